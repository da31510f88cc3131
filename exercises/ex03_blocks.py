# Exercise 3 · Blocks: build it.
#
# This is pagedattn/cache/blocks.py without these bodies:
#
#     FreeList.push_back
#     FreeList.push_front
#     FreeList.pop
#     FreeList.remove
#     FreeList._link
#     BlockPool.grow
#     BlockPool.give_back
#     BlockPool._share
#     BlockPool._take
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=3    the engine's own tests on your file, and one hint
#     make hint N=3        a hint alone
#     make reset N=3       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=3 make serve    the server, on your code
#
# The idea is in book/03_blocks.ipynb.
# One solution is pagedattn/cache/blocks.py itself.
#
# Made from pagedattn/cache/blocks.py by exercises/tools.py. Untouched: 343b8e045f8f

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
        raise NotImplementedError("exercise 3: FreeList.push_back")

    def push_front(self, block: Block) -> None:
        """Put `block` where it is reused first."""
        raise NotImplementedError("exercise 3: FreeList.push_front")

    def pop(self) -> Block:
        """Remove and return the block to reuse next; the list must not be empty."""
        raise NotImplementedError("exercise 3: FreeList.pop")

    def remove(self, block: Block) -> Block:
        """Remove `block`, wherever it stands; it must be in the list."""
        raise NotImplementedError("exercise 3: FreeList.remove")

    def _link(self, before: Block, block: Block, after: Block) -> None:
        raise NotImplementedError("exercise 3: FreeList._link")


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
        raise NotImplementedError("exercise 3: BlockPool.grow")

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Let go of `blocks`, tail first. Free indexed blocks wait for hits in LRU
        order; the others are reused first."""
        raise NotImplementedError("exercise 3: BlockPool.give_back")

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
        raise NotImplementedError("exercise 3: BlockPool._share")

    def _take(self) -> Block:
        raise NotImplementedError("exercise 3: BlockPool._take")
