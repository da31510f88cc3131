"""How much of a step's contexts is one and the same, and when to read it once for all.

It compares tables of a plan and nothing else: equal block ids are equal keys and
values. vLLM's bounds hold: `--no-disable-cascade-attn` asks for it, and it takes many
requests and a long prefix to pay. Chapter 07 reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedattn.scheduler import Item

FEWEST, SHORTEST = 8, 256  # requests, and tokens that all of them share


def common_prefix(items: Sequence[Item], block_size: int) -> int:
    """Tokens in whole blocks that every context begins with, all of them computed
    before any of the step's own."""
    first = items[0]
    blocks = min(item.start for item in items) // block_size
    for item in items[1:]:
        for mine, theirs in zip(item.tables, first.tables, strict=True):
            blocks = _equal(mine[:blocks], theirs[:blocks])
    return blocks * block_size


def _equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids are the same before the first that differs."""
    if a == b:  # microseconds, where to make arrays of them takes hundreds
        return len(a)
    differ = np.flatnonzero(np.asarray(a, np.int64) != np.asarray(b, np.int64))
    return int(differ[0]) if len(differ) else len(a)


def worth_sharing(items: Sequence[Item], block_size: int, most: int) -> int:
    """`common_prefix`, or 0 where it is too short for too few requests, or where the
    step has more than `most` tokens: their states between the two launches would take
    more memory than a start has measured."""
    tokens = sum(len(item.tokens) for item in items)
    if len(items) < FEWEST or tokens > most:
        return 0
    shared = common_prefix(items, block_size)
    return shared if shared >= SHORTEST else 0
