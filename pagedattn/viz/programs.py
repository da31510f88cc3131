"""A launch drawn from what its programs did: who read which slot, in which tile.

Listens to Triton's interpreter while kernels run in it. Knows addresses and a cache's
layout; knows no kernel. Chapter 07 uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedattn.viz.figure import COLOURS, SQUARES, Figure, label, page, rect
from pagedattn.viz.story import cast, play, stage, word
from pagedattn.viz.strip import COLUMNS, GAP, HEIGHT, LEFT, SLOT

CELL = 190  # pixels: width of a program's box


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store of one program: addresses in bytes, and which were wanted.

    `launch` counts from 0 the kernels that were started meanwhile.
    """

    launch: int
    program: tuple[int, int, int]
    stores: bool
    addresses: np.ndarray
    mask: np.ndarray

    def touches(self, tensor: Tensor) -> bool:
        """Whether it wants anything, and all of it lies in that tensor's memory."""
        at = self.addresses[self.mask] - tensor.data_ptr()
        return at.size > 0 and bool((at >= 0).all() and (at < tensor.nbytes).all())

    def slots(self, cache: Tensor) -> list[int]:
        """Slots of a contiguous cache, block * block_size + offset, that it wants."""
        _, heads, size, dim = cache.shape
        row = (self.addresses[self.mask] - cache.data_ptr()) // cache.itemsize // dim
        return sorted({int(r // (heads * size) * size + r % size) for r in row})

    def squares(self) -> str:
        """The tile, a line for each of its rows: coloured where it was wanted."""
        rows = np.atleast_2d(self.mask)
        return "\n".join("".join("⬜🟦"[int(x)] for x in row) for row in rows)


@contextmanager
def watching() -> Iterator[list[Access]]:
    """Meanwhile, what programs load and store is written down, in order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    found: list[Access] = []
    launches = 0
    start = builder.set_grid_dim
    load, store = builder.create_masked_load, builder.create_masked_store

    def begin(*grid: int) -> None:
        nonlocal launches
        launches += 1
        start(*grid)

    def write_down(stores: bool, pointers: Any, mask: Any) -> None:
        at, wanted = pointers.data.astype(np.int64), mask.data.astype(bool)
        found.append(Access(launches - 1, builder.grid_idx, stores, at, wanted))

    def masked_load(pointers: Any, mask: Any, *more: Any) -> Any:
        write_down(False, pointers, mask)
        return load(pointers, mask, *more)

    def masked_store(pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        write_down(True, pointers, mask)
        return store(pointers, value, mask, *more)

    builder.set_grid_dim = begin
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    try:
        yield found
    finally:
        for name in ("set_grid_dim", "create_masked_load", "create_masked_store"):
            delattr(builder, name)


@dataclass(frozen=True, slots=True)
class Batch:
    """The running requests' last queries, over the cache that their tables point into.

    q [seqs, heads, dim]; k, v [blocks, kv_heads, block_size, dim], NaN where nothing
    is.
    """

    names: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor


def batch(steps: int = 3, heads: int = 2, dim: int = 8, seed: int = 40) -> Batch:
    """The book's cast after some steps of the real scheduler; numbers of that seed."""
    scheduler, camera = stage()
    play(scheduler, camera, cast(), steps=steps)
    running = list(scheduler.running)
    make = torch.Generator().manual_seed(seed)
    k, v = torch.full((2, 11, 1, 4, dim), torch.nan)
    tables = torch.zeros(len(running), 4, dtype=torch.int32)
    for s, request in enumerate(running):
        (table,) = scheduler.tables.ids(request)
        tables[s, : len(table)] = torch.tensor(table)
        for t in range(request.computed):
            at = table[t // 4], 0, t % 4
            k[at], v[at] = torch.randn(2, dim, generator=make)
    return Batch(
        tuple(request.id for request in running),
        tuple(tuple(map(word, r.tokens[: r.computed])) for r in running),
        torch.randn(len(running), heads, dim, generator=make),
        k,
        v,
        tables,
        torch.tensor([r.computed for r in running], dtype=torch.int32),
    )


# Drawing: every slot in the colours of the programs that read it, then the programs.
def picture(seen: Sequence[Access], this: Batch) -> Figure:
    """Which program (chunk, head, sequence) of the first launch read which keys."""
    readers = _readers([access for access in seen if access.launch == 0], this.k)
    places = list(readers)
    parts = [label(LEFT, 26, _title(readers), size=15, font_weight="bold")]
    y = 40.0
    for block in range(1, len(this.k)):
        i = block - 1
        x = LEFT + i % COLUMNS * (4 * SLOT + GAP)
        top = y + i // COLUMNS * (HEIGHT + 28)
        parts += _block(block, x, top, readers, this)
    y += -(-(len(this.k) - 1) // COLUMNS) * (HEIGHT + 28) + 6
    for i, place in enumerate(places):
        column, row = place[0], place[2]
        at = LEFT + column * (CELL + 8), y + row * 36
        parts += _box(place, i, len(readers[place]), this.names[row], *at)
    y += 36 * len(this.names)
    width = 2 * LEFT + COLUMNS * (4 * SLOT + GAP) - GAP
    return Figure(page(width, y + 8, parts), _text(readers, this), _title(readers))


def _readers(
    seen: Sequence[Access], keys: Tensor
) -> dict[tuple[int, int, int], list[int]]:
    """Every program, in the order in which they ran, and the slots that it read."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for access in seen:
        slots = found.setdefault(access.program, [])
        if not access.stores and access.touches(keys):
            slots += access.slots(keys)
    return found


def _title(readers: dict[tuple[int, int, int], list[int]]) -> str:
    busy = sum(bool(slots) for slots in readers.values())
    return f"{len(readers)} programs, {busy} of them with something to read"


def _block(
    block: int,
    x: float,
    y: float,
    readers: dict[tuple[int, int, int], list[int]],
    this: Batch,
) -> Iterator[str]:
    words = {
        int(this.tables[s, t // 4]) * 4 + t % 4: text
        for s, line in enumerate(this.words)
        for t, text in enumerate(line)
    }
    yield label(x + 2, y + 12, block, size=11, fill="#777777", font_weight="bold")
    for i in range(4):
        slot, left = block * 4 + i, x + i * SLOT
        yield rect(left, y + 16, SLOT, HEIGHT, "#f6f6f6", stroke="#dddddd")
        who = [n for n, slots in enumerate(readers.values()) if slot in slots]
        for k, n in enumerate(who):
            deep = HEIGHT / len(who)
            fill = COLOURS[n % len(COLOURS)]
            yield rect(left, y + 16 + k * deep, SLOT, deep, fill, fill_opacity=0.55)
        text = words.get(slot, "")
        size = 12 if len(text) < 7 else 10
        yield label(left + SLOT / 2, y + 37, text, size=size, text_anchor="middle")


def _box(
    place: tuple[int, int, int], n: int, slots: int, name: str, x: float, y: float
) -> Iterator[str]:
    fill = COLOURS[n % len(COLOURS)] if slots else "#ffffff"
    yield rect(x, y, CELL, 30, fill, stroke="#888888", fill_opacity=0.55, rx=4)
    what = f"{slots} slots" if slots else "returns"
    yield label(x + 8, y + 20, f"{place} {name}: {what}")


def _text(readers: dict[tuple[int, int, int], list[int]], this: Batch) -> str:
    lines = [_title(readers)]
    for n, (place, slots) in enumerate(readers.items()):
        square = SQUARES[n % len(SQUARES)] if slots else "⬜"
        blocks = " ".join(str(b) for b in dict.fromkeys(slot // 4 for slot in slots))
        what = f"{len(slots)} slots, blocks {blocks}" if slots else "returns"
        lines.append(f"{square} program {place}, {this.names[place[2]]}: {what}")
    return "\n".join(lines)
