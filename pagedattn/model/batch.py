"""`Plan` -> flat tensors: what one forward pass reads, for every request at once.

Knows plans and torch; knows nothing of models, sampling or why a request was
planned. Shapes: T tokens, S requests, G layer groups, R rows that sample. Built in
chapter 06.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    tables: Tensor  # [G, S, blocks] int32, filled up with the null block
    query_starts: Tensor  # [S + 1] int32: where each request's tokens begin
    lengths: Tensor  # [S] int32: context length including this plan's tokens
    num_decodes: int
    rows: Tensor  # [R] int64: tokens whose logits are wanted


def decodes_first(items: Sequence[Item]) -> list[int]:
    """The order of a plan's items in a batch: those of one token before the others."""
    return sorted(range(len(items)), key=lambda i: len(items[i].tokens) > 1)


@dataclass(slots=True)
class _Row:
    """One table as an array: the first `filled` of `ids`, `nulls` of them leading."""

    epoch: int
    ids: np.ndarray = field(default_factory=lambda: np.zeros(16, dtype=np.int32))
    filled: int = 0
    nulls: int = 0

    def follow(self, table: Sequence[int]) -> np.ndarray:
        """`table` as an array, of which only what is new is copied."""
        if len(table) > len(self.ids):
            room = np.zeros(2 * len(table), dtype=np.int32)
            room[: self.filled] = self.ids[: self.filled]
            self.ids = room
        if len(table) > self.filled:
            self.ids[self.filled : len(table)] = table[self.filled :]
            self.filled = len(table)
        while self.nulls < len(table) and table[self.nulls] == 0:
            self.ids[self.nulls] = 0
            self.nulls += 1
        return self.ids[: len(table)]


class TableRows:
    """Requests' tables as arrays, from one plan to the next.

    A context of 100,000 tokens has 6,250 blocks, and to make an array of their ids
    takes 0.3 ms. Within an epoch a table only grows, but for leading blocks that fall
    behind a window and turn null. So only what is new need be copied.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], _Row] = {}

    def follow(self, item: Item, group: int) -> np.ndarray:
        """int32 [blocks]: the item's table of one group; valid until the next call."""
        row = self._rows.get((item.request_id, group))
        if row is None or row.epoch != item.epoch:
            row = self._rows[item.request_id, group] = _Row(item.epoch)
        return row.follow(item.tables[group])

    def forget(self, request_id: str) -> None:
        """Drop a request's rows, if there are any."""
        group = 0
        while self._rows.pop((request_id, group), None) is not None:
            group += 1


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
    tables = _tables(items, rows or TableRows())
    blocks = tables[:, request, positions // block_size].astype(np.int64)  # [G, T]
    samples = [starts[i + 1] - 1 for i, item in enumerate(items) if item.samples]
    return Batch(
        ids=torch.tensor([t for row in tokens for t in row], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        tables=torch.from_numpy(tables),
        query_starts=torch.from_numpy(starts),
        lengths=torch.from_numpy((first + counts).astype(np.int32)),
        num_decodes=int((counts == 1).sum()),
        rows=torch.tensor(samples, dtype=torch.int64),
    )


def _tables(items: Sequence[Item], rows: TableRows) -> np.ndarray:
    groups = len(items[0].tables)
    widest = max(len(table) for item in items for table in item.tables)
    tables = np.zeros((groups, len(items), widest), dtype=np.int32)
    for s, item in enumerate(items):
        for g, table in enumerate(item.tables):
            tables[g, s, : len(table)] = rows.follow(item, g)
    return tables
