"""A table's block ids as plans carry them: frozen, though the table grows on.

Knows nothing of blocks or requests. Built in chapter 05.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any


class BlockIds(Sequence[int]):
    """Block ids that never change; what grows from them shares the list behind.

    So a plan of a context of 100,000 tokens, which has 6,250 blocks, costs the same as
    one of 100. Equal to any sequence of the same ids; sent elsewhere, a tuple.
    """

    __slots__ = ("_ids", "_n")

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = list(ids)
        self._n = len(self._ids)

    def grown(self, more: Iterable[int]) -> BlockIds:
        """These ids and `more`; of all that share a list, only the longest can grow."""
        assert self._n == len(self._ids)
        longer = BlockIds(())
        longer._ids = self._ids
        longer._ids.extend(more)
        longer._n = len(longer._ids)
        return longer

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        """One id, or a tuple of them."""
        if isinstance(i, slice):
            return tuple([self._ids[j] for j in range(*i.indices(self._n))])
        return self._ids[range(self._n)[i]]

    def __iter__(self) -> Iterator[int]:
        return islice(self._ids, self._n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)
