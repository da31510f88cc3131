"""Generated mutants that no test can or should notice, and why.

Keys are (file, where, old statement, new statement), without line numbers; an entry
that no longer fits a mutant fails a test, and with PROFILE=long so does one that a
test does notice.
"""

Key = tuple[str, str, str, str]  # Mutant.key

BLOCKS, PREFIX, TABLES = "cache/blocks.py", "cache/prefix.py", "cache/tables.py"
SCHEDULER = "scheduler.py"


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
}
