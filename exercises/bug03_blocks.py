# Exercise bug3 · Blocks: find the bug.
#
# This is pagedattn/cache/blocks.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     The server runs for hours. Once the pool is full of cached prompts, a long prompt
#     that is partly cached stops it with an AssertionError deep inside the free list;
#     without assertions, one user's text turns up in another's.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug3    the engine's own tests on your file, and one hint
#     make hint N=bug3        a hint alone
#     make reset N=bug3       this file as it was; yours is kept beside it
#
# The idea is in book/03_blocks.ipynb.
#
# Made from pagedattn/cache/blocks.py by exercises/tools.py. Untouched: 39385b86ff85

"""KV blocks: who holds them, and which free one is reused next.

Knows reference counts and order of reuse; knows nothing of tokens, requests or
tensors. A block is an id; slot = id × block size + offset. Built in chapter 03.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from pagedattn.trace import Emit, silence


class Block:
    """One block: its id, how many tables hold it, and the key it is indexed under."""

    __slots__ = ("id", "refs", "key", "previous", "next")

    def __init__(self, id: int) -> None:
        self.id = id
        self.refs = 0
        self.key: Hashable | None = None  # set by the prefix index alone
        self.previous: Block | None = None  # neighbours in the free list
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.refs})"


class FreeList:
    """Free blocks in order of reuse: a doubly linked ring, every operation O(1)."""

    def __init__(self) -> None:
        self._ends = Block(0)  # stands before the first block and after the last
        self._ends.previous = self._ends.next = self._ends
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not self._ends:
            yield block
            block = block.next

    def push_back(self, block: Block) -> None:
        """Put `block` where it is reused last."""
        self._link(self._ends.previous, block, self._ends)

    def push_front(self, block: Block) -> None:
        """Put `block` where it is reused first."""
        self._link(self._ends, block, self._ends.next)

    def pop(self) -> Block:
        """Remove and return the block to reuse next; the list must not be empty."""
        return self.remove(self._ends.next)

    def remove(self, block: Block) -> Block:
        """Remove `block`, wherever it stands; it must be in the list."""
        assert block.next is not None and block is not self._ends
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self._size -= 1
        return block

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.next is None
        block.previous, block.next = before, after
        before.next = after.previous = block
        self._size += 1


class BlockPool:
    """All blocks. Block 0 is the null block: always there, never taken, never read.

    `forget` is told of a block that is about to be reused while indexed.
    """

    def __init__(
        self,
        num_blocks: int,
        forget: Callable[[Block], None],
        emit: Emit = silence,
    ) -> None:
        assert num_blocks >= 2
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null = self.blocks[0]
        self.free = FreeList()
        for block in self.blocks[1:]:
            self.free.push_back(block)
        self._forget = forget
        self._emit = emit

    def trace_to(self, emit: Emit) -> None:
        """Tell `emit`, and nobody else, of what happens from now on."""
        self._emit = emit

    @property
    def usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return len(self.blocks) - 1

    def grow(self, hits: Sequence[Block], n: int) -> list[Block] | None:
        """Share `hits` and take `n` free blocks, evicting what those cached.

        Returns the new blocks; None, changing nothing, if hits that lie in the free
        list and `n` together are more than are free.
        """
        idle = sum(block.refs == 0 for block in hits)
        if max(idle, n) > len(self.free):
            return None
        for block in hits:
            self._share(block)
        return [self._take() for _ in range(n)]

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Let go of `blocks`, tail first. Free indexed blocks wait for hits in LRU
        order; the others are reused first."""
        for block in blocks:
            if block is self.null:
                continue
            assert block.refs > 0
            block.refs -= 1
            if block.refs == 0:
                indexed = block.key is not None
                (self.free.push_back if indexed else self.free.push_front)(block)
                self._emit("free", blocks=(block.id,))

    def check(self, tables: Iterable[Iterable[Block]]) -> None:
        """Assert that `tables` are all that holds blocks, and that counts agree."""
        held = Counter(b.id for table in tables for b in table if b is not self.null)
        free = [block.id for block in self.free]
        assert len(free) == len(set(free)) == len(self.free)
        assert self.null.refs == 0 and self.null.key is None and 0 not in free
        for block in self.blocks[1:]:
            assert block.refs == held[block.id], (block, held[block.id])
            assert (block.refs == 0) == (block.next is not None), block
        assert len(free) + len(held) == self.usable

    def _share(self, block: Block) -> None:
        if block.refs == 0:
            self.free.remove(block)
        block.refs += 1
        self._emit("share", blocks=(block.id,))

    def _take(self) -> Block:
        block = self.free.pop()
        if block.key is not None:
            self._emit("evict", blocks=(block.id,))
            self._forget(block)
        block.refs = 1
        self._emit("take", blocks=(block.id,))
        return block
