"""`Plan` -> flat tensors: what one forward pass reads, for every request at once.

Knows plans and torch; knows nothing of models, sampling or why a request was
planned. Shapes: T tokens, S requests, G layer groups, R rows that sample. Built in
chapter 06.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedattn.scheduler import Item


class LayerCache(NamedTuple):
    """One layer's keys and values, and the group whose tables and slots it uses."""

    k: Tensor
    v: Tensor
    group: int


@dataclass(slots=True)
class Batch:
    """One plan as tensors. The first `num_decodes` requests have one token each."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [G, T] int64: block × block size + offset
    tables: Tensor  # [G, S, room] int32: no more of a row counts than its length says
    query_starts: Tensor  # [S + 1] int32: where each request's tokens begin
    lengths: Tensor  # [S] int32: context length including this plan's tokens
    num_decodes: int
    rows: Tensor  # [R] int64: tokens whose logits are wanted
    shared: int = 0  # tokens that all contexts begin with, worth reading once for all


def decodes_first(items: Sequence[Item]) -> list[int]:
    """The order of a plan's items in a batch: those of one token before the others."""
    return sorted(range(len(items)), key=lambda i: len(items[i].tokens) > 1)


class TableRows:
    """The tables of a batch as one array, kept from one plan to the next.

    A context of 100,000 tokens has 6,250 blocks: to copy their ids takes 6 us, to make
    an array of them 300. Within an epoch a table only grows, but for leading blocks
    that fall behind a window and turn null. So while the same requests are planned in
    the same order only what is new is written, and a table that is the one of the step
    before is not looked at: its memory is cold. Else rows move to their new places.
    """

    def __init__(self) -> None:
        self._ids = np.zeros((0, 0, 0), dtype=np.int32)  # [G, S, room]
        self._keys: list[tuple[str, int]] = []  # whose row it is, in which epoch
        self._written: list[list[Sequence[int]]] = []  # [S][G] tables, as written
        self._nulls: list[list[int]] = []  # [S][G] of their ids, leading nulls

    def follow(self, items: Sequence[Item]) -> np.ndarray:
        """int32 [G, S, room]: the items' tables; valid until the next call."""
        keys = [(item.request_id, item.epoch) for item in items]
        widest = max(len(table) for item in items for table in item.tables)
        if keys != self._keys or widest > self._ids.shape[2]:
            self._arrange(keys, len(items[0].tables), widest)
        for s, item in enumerate(items):
            for g, table in enumerate(item.tables):
                if table is not self._written[s][g]:
                    self._write(s, g, table)
        return self._ids

    def _arrange(self, keys: list[tuple[str, int]], groups: int, widest: int) -> None:
        """A row for each of `keys`; those that there were keep what is written."""
        width = self._ids.shape[2]
        room = width if widest <= width else 2 * widest
        ids = np.zeros((groups, len(keys), room), dtype=np.int32)
        places = {key: s for s, key in enumerate(self._keys)}
        stay = [(s, places[key]) for s, key in enumerate(keys) if key in places]
        written, nulls = ([[x] * groups for _ in keys] for x in ((), 0))
        for s, old in stay:
            ids[:, s, :width] = self._ids[:, old]
            written[s], nulls[s] = self._written[old], self._nulls[old]
        self._ids, self._keys, self._written, self._nulls = ids, keys, written, nulls

    def _write(self, s: int, g: int, table: Sequence[int]) -> None:
        filled, nulls = len(self._written[s][g]), self._nulls[s]
        if len(table) > filled:
            self._ids[g, s, filled : len(table)] = table[filled:]
        self._written[s][g] = table
        while nulls[g] < len(table) and table[nulls[g]] == 0:
            self._ids[g, s, nulls[g]] = 0
            nulls[g] += 1


def make_batch(
    items: Sequence[Item],
    tokens: Sequence[Sequence[int]],
    block_size: int,
    rows: TableRows | None = None,
) -> Batch:
    """The batch of `items`, in their order, decodes first; `tokens` are all known.

    `rows` remembers tables between the batches of one runner.
    """
    counts = np.array([len(t) for t in tokens], dtype=np.int64)  # [S]
    first = np.array([item.start for item in items], dtype=np.int64)  # [S]
    starts = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    request = np.repeat(np.arange(len(items)), counts)  # [T]
    positions = np.arange(starts[-1]) - (starts[:-1] - first)[request]  # [T]
    tables = (rows or TableRows()).follow(items)  # [G, S, room]
    blocks = tables[:, request, positions // block_size].astype(np.int64)  # [G, T]
    samples = np.array([item.samples for item in items])  # [S]
    ids = np.array([t for row in tokens for t in row], dtype=np.int64)  # [T]
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        tables=torch.from_numpy(tables),
        query_starts=torch.from_numpy(starts),
        lengths=torch.from_numpy((first + counts).astype(np.int32)),
        num_decodes=int((counts == 1).sum()),
        rows=torch.from_numpy(starts[1:][samples].astype(np.int64) - 1),
    )
