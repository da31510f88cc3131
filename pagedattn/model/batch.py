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
    tables: Tensor  # [G, S, blocks] int32, filled up with the null block
    query_starts: Tensor  # [S + 1] int32: where each request's tokens begin
    lengths: Tensor  # [S] int32: context length including this plan's tokens
    num_decodes: int
    rows: Tensor  # [R] int64: tokens whose logits are wanted


def decodes_first(items: Sequence[Item]) -> list[int]:
    """The order of a plan's items in a batch: those of one token before the others."""
    return sorted(range(len(items)), key=lambda i: len(items[i].tokens) > 1)


def make_batch(
    items: Sequence[Item], tokens: Sequence[Sequence[int]], block_size: int
) -> Batch:
    """The batch of `items`, in their order, decodes first; `tokens` are all known."""
    counts = np.array([len(t) for t in tokens], dtype=np.int64)  # [S]
    first = np.array([item.start for item in items], dtype=np.int64)  # [S]
    starts = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    request = np.repeat(np.arange(len(items)), counts)  # [T]
    positions = np.arange(starts[-1]) - (starts[:-1] - first)[request]  # [T]
    tables = _tables(items)
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


def _tables(items: Sequence[Item]) -> np.ndarray:
    groups = len(items[0].tables)
    widest = max(len(table) for item in items for table in item.tables)
    tables = np.zeros((groups, len(items), widest), dtype=np.int32)
    for s, item in enumerate(items):
        for g, table in enumerate(item.tables):
            tables[g, s, : len(table)] = table
    return tables
