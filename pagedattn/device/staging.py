"""A step's inputs in one piece of memory, so that one copy brings them to the device.

The host fills one of two pinned buffers while the device may still read the other.
Where a field stands depends on the step's shape alone, so a graph finds it at the same
address each time. It knows layouts, and nothing of what is computed. Chapter 07 reads
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedattn.device.buckets import Shape
from pagedattn.model.batch import Batch

ALIGN = 128  # bytes: each field begins where a wide load may
DEPTH = 2  # steps in flight: one runs, the next is being prepared


@dataclass(frozen=True, slots=True)
class Fields:
    """The inputs of one shape, as views of one buffer; T tokens, S rows, G groups.

    `source[t]` is the row of the step before that sampled token t, -1 where `ids[t]`
    holds it.
    """

    ids: Tensor  # [T] int64
    source: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [G, T] int64
    rows: Tensor  # [S] int64: each request's last token
    top_p: Tensor  # [S] float64
    uniform: Tensor  # [S] float64
    tables: Tensor  # [G, S, width] int32
    query_starts: Tensor  # [S + 1] int32
    lengths: Tensor  # [S] int32
    top_k: Tensor  # [S] int32
    temperature: Tensor  # [S] float32
    min_p: Tensor  # [S] float32

    def batch(
        self, num_decodes: int, tokens: int | None = None, shared: int = 0
    ) -> Batch:
        """What a model reads of them, or of the first so many tokens."""
        return Batch(
            self.ids[:tokens],
            self.positions[:tokens],
            self.slots[:, :tokens],
            self.tables,
            self.query_starts,
            self.lengths,
            num_decodes,
            self.rows,
            shared,
        )


def layout(shape: Shape, groups: int) -> Iterator[tuple[str, torch.dtype, tuple]]:
    """(name, dtype, sizes) of each field, in their order in memory: tokens' fields
    first, so that for one number of tokens they stand in one place."""
    t, s = shape.tokens, shape.seqs
    whole, small = torch.int64, torch.int32
    yield from ((name, whole, (t,)) for name in ("ids", "source", "positions"))
    yield "slots", whole, (groups, t)
    yield "rows", whole, (s,)
    yield from ((name, torch.float64, (s,)) for name in ("top_p", "uniform"))
    yield "tables", small, (groups, s, shape.width)
    yield "query_starts", small, (s + 1,)
    yield from ((name, small, (s,)) for name in ("lengths", "top_k"))
    yield from ((name, torch.float32, (s,)) for name in ("temperature", "min_p"))


def num_bytes(shape: Shape, groups: int) -> int:
    """Bytes that the inputs of a shape take."""
    return sum(_room(dtype, size) for _, dtype, size in layout(shape, groups))


def fields_of(buffer: Tensor, shape: Shape, groups: int) -> Fields:
    """The inputs of a shape in a buffer of bytes."""
    views: dict[str, Any] = {}
    start = 0
    for name, dtype, size in layout(shape, groups):
        end = start + math.prod(size) * dtype.itemsize
        views[name] = buffer[start:end].view(dtype).view(size)
        start += _room(dtype, size)
    return Fields(**views)


def _room(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    return -(-math.prod(size) * dtype.itemsize // ALIGN) * ALIGN


def fill(fields: Fields, batch: Batch, source: Tensor) -> None:
    """Write a batch on the host; what a shape has beyond it becomes rows of no use.

    Such a row is one token of its own, id 0 at position 0, which reads and writes the
    null block, and takes the largest logit. Where tokens end first it has none, and
    where rows do, tokens belong to nobody. `source` [T] says where tokens come from.
    """
    t, s = len(batch.ids), len(batch.lengths)
    for field, value, fill_with in (
        (fields.ids, batch.ids, 0),
        (fields.source, source, -1),
        (fields.positions, batch.positions, 0),
        (fields.lengths, batch.lengths, 1),
    ):
        field[: len(value)] = value
        field[len(value) :] = fill_with
    fields.slots[:, :t] = batch.slots
    fields.slots[:, t:] = 0
    width = min(batch.tables.shape[2], fields.tables.shape[2])
    fields.tables[:, :s, :width] = batch.tables[:, :, :width]
    fields.tables[:, s:] = 0
    fields.query_starts[: s + 1] = batch.query_starts
    padding = len(fields.lengths) - s
    ends = torch.arange(t + 1, t + 1 + padding).clamp(max=len(fields.ids))
    fields.query_starts[s + 1 :] = ends
    fields.rows.copy_(fields.query_starts[1:] - 1)
