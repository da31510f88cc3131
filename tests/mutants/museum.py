"""Mutants written by hand: mistakes that real engines made, in this engine's words.

Each entry replaces one fragment of one file, which must stand there exactly once. The
numbers are those of the list of known mistakes that the book's exercises use; those of
its 26 entries that no graded file can make are `BEYOND`. Mistakes without a number are
classics of attention kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One known mistake: `what` went wrong, and the edit that brings it back."""

    number: int | None
    what: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.number or self.file}: {self.what}"


BEYOND = {
    16: "the server's events and parameters: tests/test_serve.py",
    19: "the merge of split keys: the specification's softmax is of one piece",
}

BLOCKS, PREFIX, TABLES = "cache/blocks.py", "cache/prefix.py", "cache/tables.py"
SCHEDULER, REQUEST, ENGINE = "scheduler.py", "request.py", "engine.py"
STOP, DETOKENIZER = "text/stop.py", "text/detokenizer.py"
FILTERS, PENALTIES = "sampling/filters.py", "sampling/penalties.py"
RANDOM, SAMPLER, SPEC = "sampling/random.py", "sampling/sampler.py", "kernels/spec.py"

EXHIBITS = (
    # A prompt found whole in the cache leaves zero tokens to compute.
    Exhibit(
        1,
        "a hit may be the whole prompt",
        TABLES,
        "(len(request.tokens) - 1) // self.block_size",
        "len(request.tokens) // self.block_size",
    ),
    # The budget is charged before the hit is known, or with what a hit once was.
    Exhibit(
        2,
        "the budget is charged before the hit is known",
        SCHEDULER,
        "behind = request.num_tokens - hits.tokens",
        "behind = request.num_tokens",
    ),
    Exhibit(
        2,
        "the chunk is counted from the last admission's hit",
        SCHEDULER,
        "behind = request.num_tokens - hits.tokens",
        "behind = request.num_tokens - (request.cached or 0)",
    ),
    # Blocks enter the index before their keys and values are about to be written.
    Exhibit(
        3,
        "blocks of known tokens are indexed before they are computed",
        TABLES,
        "full = min(request.computed, len(request.tokens)) // self.block_size",
        "full = len(request.tokens) // self.block_size",
    ),
    Exhibit(
        3,
        "a failed plan leaves what it would have written in the index",
        SCHEDULER,
        "self.tables.withdraw(indexed)",
        "pass",
    ),
    Exhibit(
        3,
        "a block settled by a commit outlives the failed plan that computes it",
        SCHEDULER,
        "if self._in_flight:\n                self._in_flight[-1][1].extend(new)",
        "pass",
    ),
    # A reused block keeps its old entry: a later hit reads someone else's keys.
    Exhibit(4, "eviction forgets to forget", BLOCKS, "self._forget(block)", "pass"),
    Exhibit(
        4,
        "the index keeps the entry of a block that no longer knows it",
        PREFIX,
        "del self._blocks[block.key]",
        "pass",
    ),
    # Two identical blocks overwrite each other's entry.
    Exhibit(
        5,
        "of two equal blocks the last one is indexed",
        PREFIX,
        "if (hash, group) in self._blocks:",
        "if False:",
    ),
    # A block is freed while a live request's table still points at it.
    Exhibit(
        6,
        "who leaves first frees shared blocks",
        BLOCKS,
        "block.refs -= 1",
        "block.refs = 0",
    ),
    Exhibit(
        6,
        "a hit in the free list stays there",
        BLOCKS,
        "self.free.remove(block)",
        "pass",
    ),
    # Eviction takes the most recently freed block where LRU is meant.
    Exhibit(
        7,
        "the block freed last is reused first",
        BLOCKS,
        "(self.free.push_back if indexed",
        "(self.free.push_front if indexed",
    ),
    Exhibit(
        7,
        "worthless blocks wait behind cached ones",
        BLOCKS,
        "else self.free.push_front)(block)",
        "else self.free.push_back)(block)",
    ),
    # Freeing the head of a sequence before its tail destroys the chain.
    Exhibit(
        8,
        "a table is given back head first",
        TABLES,
        "self.pool.give_back(reversed(table))",
        "self.pool.give_back(table)",
    ),
    # One block table per layer.
    Exhibit(
        9,
        "every layer has a table of its own",
        TABLES,
        "size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)",
        "size = 1",
    ),
    # One block too many whenever a length is an exact multiple of the block size.
    Exhibit(
        10,
        "one block too many at exact multiples",
        TABLES,
        "return -(-tokens // block_size)",
        "return tokens // block_size + 1",
    ),
    # `<` for `<=` where something fits exactly.
    Exhibit(
        11,
        "the last token of the budget is never spent on a running request",
        SCHEDULER,
        "while i < len(self.running) and draft.budget:",
        "while i < len(self.running) and draft.budget > 1:",
    ),
    Exhibit(
        11,
        "a remainder that equals the budget is split",
        SCHEDULER,
        "return min(behind, draft.budget, self.config.long_prefill or behind)",
        "return min(behind, draft.budget - (1 < behind == draft.budget), "
        "self.config.long_prefill or behind)",
    ),
    Exhibit(
        11,
        "a prompt that fills the step exactly is never admitted whole",
        SCHEDULER,
        "if n < behind and not self.config.chunked_prefill:",
        "if draft.budget <= behind and not self.config.chunked_prefill:",
    ),
    Exhibit(
        11,
        "the last free block is never taken",
        BLOCKS,
        "if idle + n > len(self.free):",
        "if idle + n >= len(self.free):",
    ),
    # A remainder of one as the sign that a new block is needed.
    Exhibit(
        12,
        "a block is added only for a remainder of one",
        TABLES,
        "missing = [max(0, blocks - len(table)) for table in row.tables]",
        "missing = [int(upto % self.block_size == 1) for table in row.tables]",
    ),
    # Two counters of free blocks that can disagree.
    Exhibit(
        13,
        "removing a block leaves the count of free ones",
        BLOCKS,
        "self._size -= 1",
        "pass",
    ),
    Exhibit(
        13,
        "hits that lie in the free list are not counted",
        BLOCKS,
        "if idle + n > len(self.free):",
        "if n > len(self.free):",
    ),
    Exhibit(
        13,
        "admission counts idle hits as if they were held",
        TABLES,
        "- len(shared) + idle > len(self.pool.free)",
        "- len(shared) > len(self.pool.free)",
    ),
    # A hash without its parent: equal blocks in different contexts are shared.
    Exhibit(
        14, "the hash leaves its parent out", PREFIX, "sha256(parent)", "sha256(ROOT)"
    ),
    Exhibit(
        14,
        "every block is hashed as if it were the first",
        TABLES,
        "parent = known[-1] if known else ROOT",
        "parent = ROOT",
    ),
    # O(n) removal from the free list.
    Exhibit(
        15,
        "removal walks through the free list",
        BLOCKS,
        "assert block.next is not None and block is not self._ends",
        "assert block in list(self)",
    ),
    # Half a character is printed; a stop string leaks; the held tail is lost.
    Exhibit(
        17,
        "half a character is printed as U+FFFD",
        DETOKENIZER,
        'codecs.utf_8_decode(data, "replace", final)',
        'codecs.utf_8_decode(data, "replace", True)',
    ),
    Exhibit(
        17,
        "half a character is forgotten at the end",
        DETOKENIZER,
        "self._release(self._stream.finish())",
        "pass",
    ),
    Exhibit(
        17,
        "a character that the prompt began is forgotten",
        DETOKENIZER,
        "self._decode(tail, final=False)",
        "pass",
    ),
    Exhibit(
        17,
        "the beginning of a stop string leaks one chunk early",
        STOP,
        "cut = len(pending) - self._stops.hold_at(self._state)",
        "cut = len(pending)",
    ),
    Exhibit(
        17,
        "only the last character of a beginning is held",
        STOP,
        "return self._nodes[state].hold",
        "return min(1, self._nodes[state].hold)",
    ),
    Exhibit(
        17,
        "each chunk is searched for stop strings by itself",
        STOP,
        "pending = self._held + text",
        "self._state, pending = 0, self._held + text",
    ),
    Exhibit(
        17,
        "what was held is lost at the end",
        DETOKENIZER,
        "self._fresh.append(self._matcher.flush())",
        "pass",
    ),
    Exhibit(
        17,
        "the text behind a stop string is shown",
        STOP,
        "return pending[: at if self._include else at - len(stop)], stop",
        "return pending[:at - len(stop)] + pending[at:], stop",
    ),
    # Abort doesn't free the request's blocks, or frees them twice.
    Exhibit(
        18,
        "the end of a running request frees nothing",
        SCHEDULER,
        "if request in self.running:\n            self.tables.release(request)",
        "if request in self.running:\n            self.tables._rows.pop(request.id)",
    ),
    Exhibit(
        18,
        "blocks are given back twice",
        TABLES,
        "for table in row.tables:",
        "for table in (*row.tables, *row.tables):",
    ),
    Exhibit(
        18,
        "a second abort ends the request again",
        SCHEDULER,
        "del self._requests[request.id]",
        "pass",
    ),
    # A preempted request keeps its sampled token twice, or loses it.
    Exhibit(
        20,
        "a preempted request waits for a token that was dropped",
        SCHEDULER,
        "request.computed = request.pending = 0",
        "request.computed = 0",
    ),
    Exhibit(
        20,
        "what an earlier life sampled is appended as well",
        SCHEDULER,
        "if request is not None and request.epoch == item.epoch:",
        "if request is not None:",
    ),
    Exhibit(
        20,
        "the runner is told of the prompt alone when a request resumes",
        SCHEDULER,
        "tuple(request.tokens),",
        "tuple(request.tokens[: request.prompt_len]),",
    ),
    # `min_tokens` and ends know only the first end-of-text id.
    Exhibit(
        21,
        "only one end-of-text id ends a text",
        REQUEST,
        "if last in self.eos_ids and",
        "if last == min(self.eos_ids, default=None) and",
    ),
    Exhibit(
        21,
        "min_tokens counts the prompt",
        REQUEST,
        "if self.num_output >= params.min_tokens:",
        "if len(self.tokens) >= params.min_tokens:",
    ),
    Exhibit(
        21,
        "min_tokens masks only the first end-of-text id",
        PENALTIES,
        "row[state.held_ids] = BLOCKED",
        "row[state.held_ids[:1]] = BLOCKED",
    ),
    Exhibit(
        21,
        "a bias frees what min_tokens holds back",
        PENALTIES,
        "row[ids] += amounts",
        "row[ids] = np.maximum(row[ids], -100) + amounts",
    ),
    # The seed depends on more than the request.
    Exhibit(
        22,
        "a request resumes with another seed",
        SCHEDULER,
        "request.seed,",
        "request.seed + request.epoch,",
    ),
    Exhibit(
        22,
        "whoever is sampled takes the process's next random number",
        SAMPLER,
        "u = uniform(state.seed, state.sibling, state.position, Purpose.TOKEN)",
        "u = float(np.random.random())",
    ),
    Exhibit(
        22,
        "a row's place in the batch enters its draw",
        SAMPLER,
        "chosen = choose(row, state)\n",
        "state.seed += i\n    chosen = choose(row, state)\n",
    ),
    Exhibit(
        22,
        "every step draws the same number",
        SAMPLER,
        "state.sibling, state.position, Purpose",
        "state.sibling, 0, Purpose",
    ),
    Exhibit(
        22,
        "the answers to one prompt are all alike",
        SAMPLER,
        "state.seed, state.sibling, state.position",
        "state.seed, 0, state.position",
    ),
    Exhibit(
        22,
        "seeds that agree in 32 bits are one seed",
        RANDOM,
        "(seed >> 32) & LOW",
        "0",
    ),
    # Top-p drops the token that crosses p.
    Exhibit(
        23,
        "top-p drops the token that crosses p",
        FILTERS,
        "np.searchsorted(sums, missing) + 1]",
        "np.searchsorted(sums, missing)]",
    ),
    Exhibit(
        23,
        "top-k keeps all that equal the k-th",
        FILTERS,
        "keep[ties[: n - np.count_nonzero(keep)]] = True",
        "keep[ties] = True",
    ),
    # The prefix cache is shared by what must be kept apart.
    Exhibit(
        24,
        "the salt is left out",
        TABLES,
        "(request.first_block_keys if i == 0 else ())",
        "()",
    ),
    Exhibit(
        24,
        "the adapter is left out",
        TABLES,
        "extra = request.extra_keys + (",
        "extra = (",
    ),
    Exhibit(
        24,
        "the adapter counts for the first block alone",
        TABLES,
        "extra = request.extra_keys + (request.first_block_keys if i == 0 else ())",
        "extra = request.extra_keys + request.first_block_keys if i == 0 else ()",
    ),
    Exhibit(
        24,
        "the tag counts, its value does not",
        PREFIX,
        '(tag.encode(), value.encode("utf-8", "surrogatepass"))',
        "(tag.encode(),)",
    ),
    # Tokens past `max_tokens` are computed or returned.
    Exhibit(
        25,
        "one token past the limit is planned",
        REQUEST,
        "return 0 if self.num_tokens >= self.limit else",
        "return 0 if self.num_tokens > self.limit else",
    ),
    Exhibit(
        25,
        "one token past the limit is returned",
        REQUEST,
        "if len(self.tokens) >= self.limit else None",
        "if len(self.tokens) > self.limit else None",
    ),
    # A gauge that stays up after an abort.
    Exhibit(
        26,
        "an abort leaves the gauges as they were",
        ENGINE,
        "self._late.append(output)\n        self._gauge()",
        "self._late.append(output)",
    ),
    # Attention kernels.
    Exhibit(
        None,
        "a query does not see its own key",
        SPEC,
        "if window else j <= p",
        "if window else j < p",
    ),
    Exhibit(
        None,
        "a query sees the key after its own",
        SPEC,
        "if window else j <= p",
        "if window else j <= p + 1",
    ),
    Exhibit(
        None,
        "the window is one key too wide",
        SPEC,
        "(j > p - window)",
        "(j >= p - window)",
    ),
    Exhibit(
        None,
        "the window is one key too narrow",
        SPEC,
        "(j > p - window)",
        "(j > p - window + 1)",
    ),
    Exhibit(
        None,
        "query heads take turns on the KV heads",
        SPEC,
        ".repeat_interleave(heads // kv_heads, dim=0)",
        ".repeat(heads // kv_heads, 1, 1)",
    ),
    Exhibit(
        None,
        "scores are not capped",
        SPEC,
        "if softcap:",
        "if False:",
    ),
    Exhibit(
        None,
        "scores are not scaled back after the cap",
        SPEC,
        "scores = softcap * torch.tanh(",
        "scores = torch.tanh(",
    ),
    Exhibit(
        None,
        "scores are not scaled",
        SPEC,
        "scores = scale * (",
        "scores = (",
    ),
    Exhibit(
        None,
        "keys stand in the order of their slots",
        SPEC,
        "// block_size)].long()",
        "// block_size)].long().sort().values",
    ),
    Exhibit(
        None,
        "the queries of a chunk stand at its beginning",
        SPEC,
        "p = j[length - n :, None]",
        "p = j[:n, None]",
    ),
    Exhibit(
        None,
        "junk in the null block reaches the sum",
        SPEC,
        "rows.nan_to_num()",
        "rows",
    ),
    Exhibit(
        None,
        "slots are numbered offset first",
        SPEC,
        "slots // block_size, slots % block_size",
        "slots % len(k_cache), slots // len(k_cache)",
    ),
    Exhibit(
        None,
        "neighbours turn together, not halves",
        SPEC,
        "x[..., :half].clone(), x[..., half : 2 * half].clone()",
        "x[..., : 2 * half : 2].clone(), x[..., 1 : 2 * half : 2].clone()",
    ),
    Exhibit(
        None,
        "a half is turned by what the other has become",
        SPEC,
        "x[..., :half].clone(), x[..., half : 2 * half].clone()",
        "x[..., :half], x[..., half : 2 * half]",
    ),
    Exhibit(
        None,
        "the sum stays out of the residual",
        SPEC,
        "residual += x\n",
        "residual = residual + x\n",
    ),
    Exhibit(
        None,
        "the exact GELU stands in for the tanh one",
        SPEC,
        'approximate="tanh"',
        'approximate="none"',
    ),
)
