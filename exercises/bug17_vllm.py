# Exercise bug17 · Reading vLLM: find the bug.
#
# This is pagedattn/cache/tables.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Only with models that have several layer groups, and only when the pool is nearly
#     full: a request that begins like an earlier one sometimes gets an answer to
#     something else. Its hits were lying in the free list when it was admitted. Nothing
#     crashes; with prefix caching off, all is well.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug17    the engine's own tests on your file, and one hint
#     make hint N=bug17        a hint alone
#     make reset N=bug17       this file as it was; yours is kept beside it
#
# The idea is in book/17_vllm.ipynb.
#
# Made from pagedattn/cache/tables.py by exercises/tools.py. Untouched: e1c785d18dea

"""Block tables: where each request's keys and values lie, one table per layer group.

Layers that attend alike (everything, or a window of one width) form groups of equal
size, so that one pool of equal blocks serves them all. Knows requests' tokens and
how far they are computed; knows nothing of budgets or sampling. Built in chapters 03
and 04; windows in 06.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from pagedattn.cache.blocks import Block, BlockPool
from pagedattn.cache.ids import BlockIds
from pagedattn.cache.prefix import ROOT, PrefixIndex, block_hash
from pagedattn.request import Request


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a table; `window` = 0 attends to everything."""

    window: int
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Group layers (given by their windows) so that all groups have equal size.

    The size is that of the rarest kind, unless the most frequent kind is less than a
    quarter larger: then one group each, the smaller padded. A block then costs the
    same in every group, and 5 local layers for each global one waste nothing.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    return tuple(
        LayerGroup(window, tuple(layers[i : i + size]))
        for window, layers in sorted(kinds.items())
        for i in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True)
class Hits:
    """A cached prefix: its tokens, and for each group its blocks (null: not needed)."""

    tokens: int
    blocks: tuple[tuple[Block, ...], ...]


@dataclass(slots=True)
class _Row:
    """One request's tables. `ids` are what plans carry, new only when grown or cut."""

    tables: list[list[Block]]
    ids: list[BlockIds]
    trimmed: list[int]  # leading null blocks, for each group
    indexed: int = 0  # leading blocks that were offered to the index


class Tables:
    """Every running request's tables: look up, grow, index, trim, release."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        groups: Sequence[LayerGroup],
        block_size: int,
        chunk: int,
    ) -> None:
        """`chunk` is the greatest number of tokens computed in one step."""
        self.pool = pool
        self.index = index
        self.groups = groups
        self.block_size = block_size
        self._chunk = chunk
        self._rows: dict[str, _Row] = {}

    # Capacity: what a request alone in the pool could hold.
    def most_blocks(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens holds at most, over all groups."""
        return sum(self._most(group, tokens) for group in self.groups)

    def capacity(self) -> int:
        """Tokens that a request alone in the pool can have computed."""
        low, high = 0, self.pool.usable * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle) <= self.pool.usable:
                low = middle
            else:
                high = middle - 1
        return low

    def _most(self, group: LayerGroup, tokens: int) -> int:
        blocks = blocks_for(tokens, self.block_size)
        if not group.window:
            return blocks
        # A step holds window − 1 earlier tokens and a chunk. n tokens in a row touch
        # at most as many blocks as the first of them alone and n − 1 more.
        span = blocks_for(group.window - 2 + self._chunk, self.block_size) + 1
        return min(blocks, span)

    # Prefix hits: whole blocks, and never the last token.
    def lookup(self, request: Request) -> Hits:
        """The longest cached prefix that satisfies every group; changes nothing.

        Full groups need every block. A window group needs only those that cover the
        last window − 1 tokens before the first token to compute.
        """
        hashes = self.hashes(request, (len(request.tokens) - 1) // self.block_size)
        found = []
        for g, group in enumerate(self.groups):
            row = (self.index.get(h, g) for h in hashes)
            if not group.window:  # a gap ends the prefix of every group
                row = takewhile(lambda block: block is not None, row)
            found.append(list(row))
            hashes = hashes[: len(found[g])]
        n = self._agreed(found, len(hashes))
        blocks = tuple(
            tuple(self._needed(group, row[:n]))
            for group, row in zip(self.groups, found, strict=True)
        )
        return Hits(n * self.block_size, blocks)

    def nothing(self) -> Hits:
        """The hit of a request that may not read the cache."""
        return Hits(0, tuple(() for _ in self.groups))

    def _agreed(self, found: Sequence[Sequence[Block | None]], longest: int) -> int:
        """The longest prefix, in blocks, of which every group has what it needs."""
        best, runs = 0, [0] * len(self.groups)  # cached blocks in a row, up to here
        for n in range(1, longest + 1):
            for g, row in enumerate(found):
                runs[g] = runs[g] + 1 if row[n - 1] is not None else 0
            if all(
                run >= n - self._first_needed(group, n)
                for run, group in zip(runs, self.groups, strict=True)
            ):
                best = n
        return best

    def _first_needed(self, group: LayerGroup, n: int) -> int:
        """The first of `n` leading blocks that the token after them reads."""
        if not group.window:
            return 0
        return min(max(0, n * self.block_size - group.window + 1) // self.block_size, n)

    def _needed(
        self, group: LayerGroup, blocks: Sequence[Block | None]
    ) -> Iterator[Block]:
        first = self._first_needed(group, len(blocks))
        for i, block in enumerate(blocks):
            yield self.pool.null if i < first else block

    def hashes(self, request: Request, n: int, first: int = 0) -> list[bytes]:
        """Hashes of the request's blocks `first` to `n` − 1, whose tokens are known."""
        size, tokens, known = self.block_size, request.tokens, request.hashes
        for i in range(len(known), n):
            extra = request.extra_keys + (request.first_block_keys if i == 0 else ())
            parent = known[-1] if known else ROOT
            known.append(block_hash(parent, tokens[i * size : (i + 1) * size], extra))
        return known[first:n]

    # Growth: hits and new blocks in one act, or nothing.
    def admit(self, request: Request, hits: Hits, upto: int, reserve: int) -> bool:
        """Give a new row with `hits` and blocks for `upto` tokens; False, changing
        nothing, unless the pool could now hold `reserve` tokens of it."""
        row = _Row(
            [list(blocks) for blocks in hits.blocks],
            [BlockIds(block.id for block in blocks) for blocks in hits.blocks],
            [_leading_nulls(blocks, self.pool.null) for blocks in hits.blocks],
        )
        held = [block for table in row.tables for block in table]
        shared = [block for block in held if block is not self.pool.null]
        idle = sum(block.refs == 0 for block in shared)
        if self.most_blocks(reserve) - len(shared) + idle > len(self.pool.free):
            return False
        if not self._extend(row, shared, upto):
            return False
        row.indexed = hits.tokens // self.block_size
        self._rows[request.id] = row
        return True

    def grow(self, request: Request, upto: int) -> bool:
        """Make room for the first `upto` tokens; False, changing nothing, if there is
        none."""
        return self._extend(self._rows[request.id], (), upto)

    def _extend(self, row: _Row, hits: Sequence[Block], upto: int) -> bool:
        blocks = blocks_for(upto, self.block_size)
        if not hits and blocks <= len(row.tables[0]):  # all tables are of one length
            return True
        missing = [max(0, blocks - len(table)) for table in row.tables]
        idle = sum(block.refs == 0 for block in hits)
        if idle + sum(missing) > len(self.pool.free):
            return False
        for g, n in enumerate(missing):
            found = [block for block in row.tables[g] if block in hits]
            new = self.pool.grow(found, n)
            if new:
                row.tables[g] += new
                row.ids[g] = BlockIds(block.id for block in row.tables[g])
        return True

    def index_computed(self, request: Request) -> list[Block]:
        """Index the full blocks of known, computed tokens; the newly indexed ones."""
        row, new = self._rows[request.id], []
        full = min(request.computed, len(request.tokens)) // self.block_size
        if full <= row.indexed:
            return new
        hashes = self.hashes(request, full, row.indexed)
        for g, table in enumerate(row.tables):
            for hash, block in zip(hashes, table[row.indexed : full], strict=True):
                if block is not self.pool.null and self.index.put(hash, g, block):
                    new.append(block)
        row.indexed = full
        return new

    def trim(self, request: Request) -> None:
        """Release what lies behind the windows of plans made so far.

        Called before the next plan grows the request, so never inside the plan that
        still reads those blocks.
        """
        row = self._rows[request.id]
        for g, group in enumerate(self.groups):
            if not group.window:
                continue
            behind = max(0, request.computed - group.window + 1) // self.block_size
            if behind > row.trimmed[g]:
                self._cut(row, g, behind)

    def _cut(self, row: _Row, g: int, behind: int) -> None:
        table, first = row.tables[g], row.trimmed[g]
        self.pool.give_back(reversed(table[first:behind]))
        table[first:behind] = [self.pool.null] * (behind - first)
        row.trimmed[g] = behind
        row.ids[g] = BlockIds((*[self.pool.null.id] * behind, *row.ids[g][behind:]))

    def release(self, request: Request) -> None:
        """Give back every block of the request, tail first; its row is gone."""
        row = self._rows.pop(request.id)
        for table in row.tables:
            self.pool.give_back(reversed(table))

    def withdraw(self, blocks: Iterable[Block]) -> None:
        """Take `blocks` out of the index: what they hold was never written."""
        for block in blocks:
            self.index.forget(block)

    # What plans and people read.
    def ids(self, request: Request) -> tuple[BlockIds, ...]:
        """The request's block ids, one table per group."""
        return tuple(self._rows[request.id].ids)

    def slots(self) -> int:
        """Slots that are held now, a block shared by several tables counted once."""
        return (self.pool.usable - len(self.pool.free)) * self.block_size

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly `requests` have rows, and that everything agrees."""
        assert set(self._rows) == {request.id for request in requests}
        self.pool.check(t for row in self._rows.values() for t in row.tables)
        self.index.check()
        for row in self._rows.values():
            for table, ids in zip(row.tables, row.ids, strict=True):
                assert [block.id for block in table] == list(ids)


def _leading_nulls(blocks: Sequence[Block], null: Block) -> int:
    return next((i for i, b in enumerate(blocks) if b is not null), len(blocks))
