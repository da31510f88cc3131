"""Generated mutants that no test can or should notice, and why.

Keys are (file, where, old statement, new statement), without line numbers; an entry
that no longer fits a mutant fails a test, and with PROFILE=long so does one that a
test does notice.
"""

Key = tuple[str, str, str, str]  # Mutant.key

BLOCKS, PREFIX, TABLES = "cache/blocks.py", "cache/prefix.py", "cache/tables.py"
SCHEDULER = "scheduler.py"
STOP, DETOKENIZER = "text/stop.py", "text/detokenizer.py"
FILTERS, PENALTIES = "sampling/filters.py", "sampling/penalties.py"
SAMPLER, SPEC = "sampling/sampler.py", "kernels/spec.py"


def _all(file: str, where: str, old: str, new: list[str], why: str) -> dict[Key, str]:
    """One entry for each of `new`."""
    return {(file, where, old, changed): why for changed in new}


EQUIVALENT: dict[Key, str] = {
    **_all(
        BLOCKS,
        "Block",
        "__slots__ = ('id', 'refs', 'key', 'previous', 'next')",
        ["pass"],
        "Slots save memory and change nothing else.",
    ),
    **_all(
        BLOCKS,
        "Block.__init__",
        "self.previous: Block | None = None",
        ["pass"],
        "`previous` is set together with `next` by `_link` before anybody reads it.",
    ),
    **_all(
        BLOCKS,
        "FreeList.__init__",
        "self._ends = Block(0)",
        ["self._ends = Block(1)", "self._ends = Block(-1)"],
        "Nobody reads the id of the list's ends.",
    ),
    **_all(
        PREFIX,
        "",
        "Key = tuple[bytes, int]",
        ["pass"],
        "A name for annotations, which are not evaluated.",
    ),
    **_all(
        PREFIX,
        "",
        "ExtraKeys = Iterable[tuple[str, str]]",
        ["pass"],
        "A name for annotations, which are not evaluated.",
    ),
    **_all(
        TABLES,
        "group_layers",
        (_size := "size = max(counts) if max(counts) < 1.25 * min(counts) ")
        + "else min(counts)",
        [_size.replace("max(counts) if", "max(counts) + 1 if") + "else min(counts)"],
        "No kind has more layers than max(counts): a greater size cuts none.",
    ),
    **_all(
        TABLES,
        "_Row",
        "indexed: int = 0",
        ["indexed: int = 1", "indexed: int = -1"],
        "`admit` sets it before anybody reads it.",
    ),
    **_all(
        TABLES,
        "Tables.capacity",
        "low, high = (0, self.pool.usable * self.block_size)",
        ["low, high = (-1, self.pool.usable * self.block_size)"],
        "No tokens always fit: the search ends at 0 or above from either start.",
    ),
    **_all(
        TABLES,
        "Tables.capacity",
        "middle = (low + high + 1) // 2",
        ["middle = (low + high + 2) // 2", "middle = (low + high + 1 + 1) // 2"],
        "Whatever lies in (low, high] leads to the same edge, a little later.",
    ),
    **_all(
        TABLES,
        "Tables._agreed",
        "best, runs = (0, [0] * len(self.groups))",
        ["best, runs = (0, [1] * len(self.groups))"],
        "Up to the first gap everything is there; after it counting begins anew.",
    ),
    **_all(
        TABLES,
        "Tables.index_computed",
        "if full <= row.indexed:",
        ["pass", "if full < row.indexed:"],
        "A way out before work that finds nothing to do; it saves time.",
    ),
    **_all(
        TABLES,
        "Tables.trim",
        "behind = max(0, request.computed - group.window + 1) // self.block_size",
        ["behind = max(-1, request.computed - group.window + 1) // self.block_size"],
        "Less than nothing behind the window is as little to cut as nothing.",
    ),
    **_all(
        TABLES,
        "Tables.trim",
        "if behind > row.trimmed[g]:",
        ["if behind >= row.trimmed[g]:"],
        "Cutting nothing changes nothing, and takes its time.",
    ),
    **_all(
        TABLES,
        "Tables._cut",
        "row.trimmed[g] = behind",
        ["pass"],
        "Null blocks are skipped when given back; the mark saves going over them.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler.__init__",
        "self._epochs = 0",
        ["self._epochs = 1", "self._epochs = -1"],
        "Epochs only have to differ; none is the first.",
    ),
    **_all(
        TABLES,
        "Tables.lookup",
        "if not group.window:",
        ["pass"],
        "What lies behind a gap is found and then not agreed on.",
    ),
    **_all(
        TABLES,
        "Tables._extend",
        "if not hits and blocks <= len(row.tables[0]):",
        [
            "pass",
            "if not hits and blocks < len(row.tables[0]):",
            "if not hits and blocks <= len(row.tables[-1]):",
            "if not hits and blocks <= len(row.tables[0]) - 1:",
        ],
        "A way out for the usual case; what follows finds that nothing is missing.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler._next_in_line",
        "best, longest = (0, -1)",
        [
            "best, longest = (-1, -1)",
            "best, longest = (0, -0)",
            "best, longest = (0, -2)",
            "best, longest = (1, -1)",
        ],
        "The first of the line has a hit of 0 or more, and its place is 0.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler._renew",
        "self._epochs += 1",
        ["self._epochs += 2", "self._epochs -= 1"],
        "Epochs only have to differ, in whatever order.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler._tokens",
        "if len(known) == n:",
        ["pass", "if len(known) - 1 == n:"],
        "A way out for the usual case; what follows gives the same, with a search.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler._tokens",
        "first = start + len(known) - len(request.tokens)",
        ["first = start - len(known) - len(request.tokens)"],
        "With tokens in flight a request is one token behind: none of it is known.",
    ),
    **_all(
        SCHEDULER,
        "Scheduler._tokens",
        "return (*known, *waits[first:first + n - len(known)])",
        [
            f"return (*known, *waits[first:first + {end}])"
            for end in (
                "n - len(known) + 1",
                "n + 1 - len(known)",
                "n - (len(known) - 1)",
                "n + len(known)",
            )
        ],
        "The one token it is behind is the last in flight: no slice reaches further.",
    ),
    **_all(
        STOP,
        "_Node",
        "hold: int = 0",
        ["hold: int = -1"],
        "Only the root keeps it, and a cut one past the end is a cut at the end.",
    ),
    **_all(
        DETOKENIZER,
        "TextStream._read_prompt",
        "if len(tail) >= 3:",
        ["if len(tail) > 3:", "if len(tail) - 1 >= 3:", "if len(tail) >= 4:"],
        "Three bytes hold any unfinished character; reading one more changes nothing.",
    ),
    **_all(
        DETOKENIZER,
        "Detokenizer.__init__",
        (_matcher := "self._matcher = StopMatcher(StopStrings(stop), include_stop")
        + "_str_in_output) if stop else None",
        [_matcher + "_str_in_output)"],
        "An automaton without strings lets all text pass, and takes its time.",
    ),
    **_all(
        DETOKENIZER,
        "Detokenizer.text",
        "return self._read[0] + ''.join(self._fresh)",
        ["return self._read[-1] + ''.join(self._fresh)"],
        "The line before has left one piece, the first and the last.",
    ),
    **_all(
        PENALTIES,
        "penalize",
        "row[seen.ids] = np.where(x > 0, x / repetition, x * repetition)",
        ["row[seen.ids] = np.where(x >= 0, x / repetition, x * repetition)"],
        "Nothing times or by any number is nothing.",
    ),
    **_all(
        SAMPLER,
        "",
        "CHUNK = 256",
        ["CHUNK = 257", "CHUNK = 255"],
        "How many weights are summed at once matters for time alone.",
    ),
    **_all(
        SAMPLER,
        "_sample_row",
        "if state.plain:",
        ["pass"],
        "The short way for rows that ask for nothing; the long one ends there too.",
    ),
    **_all(
        SAMPLER,
        "_sample_row",
        "row = shape(raw, state) if state.shaped else raw",
        ["row = shape(raw, state)"],
        "A row that nothing shapes is copied as it is.",
    ),
    **_all(
        SAMPLER,
        "pick",
        "inside = np.cumsum(weights[start:start + CHUNK], dtype=np.float64)",
        ["inside = np.cumsum(weights[start:start + CHUNK + 1], dtype=np.float64)"],
        "The sum passes the goal inside the chunk: what follows is not reached.",
    ),
    **_all(
        FILTERS,
        "",
        "NEGLIGIBLE = 50.0",
        ["NEGLIGIBLE = 100.0"],
        "More tokens that weigh nothing are looked at; no draw can tell.",
    ),
    **_all(
        FILTERS,
        "",
        "DRAWER_BITS = 18",
        ["DRAWER_BITS = 19", "DRAWER_BITS = 17"],
        "Fewer drawers with more in them, or more with less: a matter of time.",
    ),
    **_all(
        FILTERS,
        "first",
        "if n >= len(values):",
        ["if n > len(values):", "if n >= len(values) + 1:"],
        "All values by the long way: all above the smallest, and its ties.",
    ),
    **_all(
        FILTERS,
        "nucleus",
        (_bar := "ids = np.flatnonzero(weights ")
        + ">= 0.999 * (1 - p) * total / len(weights))",
        [
            _bar + "> 0.999 * (1 - p) * total / len(weights))",
            *(
                f"{_bar}>= {lower})"
                for lower in (
                    "0.999 * (1 - p) * total / len(weights) - 1",
                    "(0.999 * (1 - p) * total - 1) / len(weights)",
                    "0.999 * (1 - p) // total / len(weights)",
                    "(0.999 * (1 - p) - 1) * total / len(weights)",
                    "0.4995 * (1 - p) * total / len(weights)",
                    "0.999 * (1 - p - 1) * total / len(weights)",
                    "0.999 * (0 - p) * total / len(weights)",
                    "0.999 * (1 - p) * total / (len(weights) + 1)",
                )
            ),
        ],
        "A lower bar: more tokens are put in order that are then left out.",
    ),
    **_all(
        FILTERS,
        "contenders",
        "if 0 < params.top_k < len(row):",
        ["if 0 < params.top_k <= len(row):", "if 0 < params.top_k < len(row) + 1:"],
        "The top of all tokens is all of them; those too far down weigh nothing.",
    ),
    **_all(
        FILTERS,
        "contenders",
        (_near := "near = row > peak - ") + "NEGLIGIBLE * params.temperature",
        [
            _near.replace(">", ">=") + "NEGLIGIBLE * params.temperature",
            _near + "NEGLIGIBLE * params.temperature - 1",
            _near + "(NEGLIGIBLE * params.temperature + 1)",
        ],
        "More tokens that weigh nothing are looked at; no draw can tell.",
    ),
    **_all(
        FILTERS,
        "contenders",
        (_few := "few = np.count_nonzero(near) ") + "< len(row) // 4",
        [
            _few + edge
            for edge in (
                "<= len(row) // 4",
                "< len(row) // 4 + 1",
                "< len(row) // 4 - 1",
                "< len(row) * 4",
                "< (len(row) + 1) // 4",
                "< (len(row) - 1) // 4",
                "< len(row) // 5",
                "< len(row) // 3",
            )
        ],
        "Where gathering pays: tokens too far down weigh nothing, in or out.",
    ),
    **_all(
        FILTERS,
        "contenders",
        "return np.flatnonzero(near) if few else None",
        ["return np.flatnonzero(near)"],
        "Tokens too far down weigh nothing, in or out; gathering takes time.",
    ),
    **_all(
        FILTERS,
        "survivors",
        "if params.min_p > 0:",
        ["if params.min_p >= 0:", "if params.min_p > -1:"],
        "Every weight is at least 0: all are kept, by the long way.",
    ),
    **_all(
        FILTERS,
        "survivors",
        "if params.top_p < 1:",
        ["if params.top_p <= 1:", "if params.top_p < 2:"],
        "The whole weight takes all tokens, but for what rounding swallows.",
    ),
    **_all(
        SPEC,
        "decode_attention",
        (_starts := "query_starts = torch.arange(len(q) + 1")
        + ", dtype=torch.int32, device=q.device)",
        [
            _starts + ", device=q.device)",
            _starts + " + 1, dtype=torch.int32, device=q.device)",
            "query_starts = torch.arange(len(q) + 2, dtype=torch.int32, "
            "device=q.device)",
        ],
        "A start behind the last sequence is not read; any whole numbers will do.",
    ),
    **_all(
        SPEC,
        "prefill_attention",
        (_cap := "scores = softcap * torch.tanh(scores / softcap)"),
        [_cap + " + 1", _cap + " - 1"],
        "Softmax does not change when all scores move by the same.",
    ),
    **_all(
        SPEC,
        "_context",
        "blocks = table[:-(-length // block_size)].long()",
        [
            "blocks = table[:-(-length // block_size - 1)].long()",
            "blocks = table[:-(-length * block_size)].long()",
        ],
        "Blocks behind the context are gathered and cut off again.",
    ),
    **_all(
        SPEC,
        "rotary",
        (_halves := "a, b = (x[..., :half].clone(), x[..., half:2 * half]")
        + ".clone())",
        [_halves + ")"],
        "The second half is read for the last time before it is written.",
    ),
    **_all(
        SPEC,
        "silu_mul",
        "gate, up = gate_up.chunk(2, dim=-1)",
        ["gate, up = gate_up.chunk(2, dim=1)"],
        "Of a matrix's two dimensions the second is the last.",
    ),
    **_all(
        SPEC,
        "gelu_tanh_mul",
        "gate, up = gate_up.chunk(2, dim=-1)",
        ["gate, up = gate_up.chunk(2, dim=1)"],
        "Of a matrix's two dimensions the second is the last.",
    ),
}
