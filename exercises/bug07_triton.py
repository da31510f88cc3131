# Exercise bug7 · Triton kernels: find the bug.
#
# This is kernels/gpu/attention.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Answers are vaguer than those of another engine on the same weights, most of all
#     in short conversations: no error, no NaN. Whoever looks closely finds lengths at
#     which all is right, 64 and 128 and 256 tokens. Prompts are read correctly; every
#     generated token suffers.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug7    the engine's own tests on your file, and one hint
#     make hint N=bug7        a hint alone
#     make reset N=bug7       this file as it was; yours is kept beside it
#
# The idea is in book/07_triton.ipynb.
#
# Made from kernels/gpu/attention.py by exercises/tools.py. Untouched: 69eecfea28a3

"""Paged attention in Triton: decode in chunks of context, prefill in tiles of queries.

The functions of spec.py: same names, arguments and KV layout. It knows tensors on one
device, and nothing of models or requests. The query heads of one KV head are rows of
one tile, so that every key and value is loaded once for all of them.

A state (acc, m, l) sums up what some rows have read: m is the largest score, l the sum
of 2^(x - m), acc that sum weighted by values. Scores are measured in powers of two,
because that is the exponential which the hardware has.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, launch, tuned
from .ragged import rows_of, tiles

LOG2E = tl.constexpr(1.4426950408889634)
# Where a maximum starts: below any score, and finite, so that m - m is 0.
LOWEST = tl.constexpr(-1e30)
EVERYTHING = 1 << 30  # a window wider than any context
PARTS = 16  # chunks that are merged at a time


class Shape(NamedTuple):
    """What is known when an attention kernel compiles."""

    group: int  # query heads of a KV head
    block_size: int
    dim: int
    wide: int  # dim, or the next power of two; a product wants 16 or more
    softcap: float


def shape_of(q: Tensor, k_cache: Tensor, softcap: float) -> Shape:
    """The shape of queries [tokens, heads, dim] over a cache."""
    _, kv_heads, block_size, dim = k_cache.shape
    group = q.shape[1] // kv_heads
    return Shape(group, block_size, dim, width(dim), float(softcap))


def width(n: int) -> int:
    """The next power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def kind_of(out: Tensor, q: Tensor, k_cache: Tensor, *_: Any) -> tuple[Any, ...]:
    """For what a choice of configuration holds: whatever the batch is."""
    return q.dtype, k_cache.dtype, q.shape[1], *k_cache.shape[1:]


# ---------------------------------------------------------------- one step of softmax


@triton.jit
def rows_at(cache, place, j, end, SHAPE: tl.constexpr):
    """The cache's rows of positions j < end, 0 from there on: [len(j), wide].

    place = (table, h, kv_heads): the sequence's table and the KV head.
    """
    table, h, kv_heads = place
    block = tl.load(table + j // SHAPE.block_size, mask=j < end, other=0).to(tl.int64)
    row = (block * kv_heads + h) * SHAPE.block_size + j % SHAPE.block_size
    d = tl.arange(0, SHAPE.wide)
    at = cache + row[:, None] * SHAPE.dim + d[None, :]
    if SHAPE.dim == SHAPE.wide:
        return tl.load(at, mask=(j < end)[:, None], other=0.0)
    inside = (j < end)[:, None] & (d < SHAPE.dim)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def scores(x, scale, SHAPE: tl.constexpr):
    """cap(scale * x), in powers of two; tanh(y) = 1 - 2 / (e^2y + 1)."""
    if SHAPE.softcap == 0.0:
        return x * (scale * LOG2E)
    y = tl.exp2(x * (2 * LOG2E * scale / SHAPE.softcap))
    return (SHAPE.softcap * LOG2E) * (1 - 2 / (y + 1))


@triton.jit
def every(x, position, j, window):
    """Scores of positions that every row sees."""
    return x


@triton.jit
def causal(x, position, j, window):
    """Scores of the positions that a row at `position` sees; -inf elsewhere."""
    ahead = position[:, None] - j[None, :]
    return tl.where((ahead >= 0) & (ahead < window), x, float("-inf"))


@triton.jit
def before(x, position, j, end):
    """Scores of positions before `end`, which is all that hides them."""
    return x


@triton.jit
def attend(state, q, position, limits, cache, place, scale, SEEN, SHAPE, KEYS):
    """The state after positions start to end, KEYS at a time; at `hole`, skip `gap`.

    limits = (start, end, hole, gap, window). SEEN: what hides scores, or lets all be.
    """
    acc, m, l = state
    start, end, hole, gap, window = limits
    k_cache, v_cache = cache
    for first in range(start, end - gap, KEYS):
        j = first + tl.where(first >= hole, gap, 0) + tl.arange(0, KEYS)
        k = rows_at(k_cache, place, j, end, SHAPE)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, KEYS]
        x = SEEN(scores(x, scale, SHAPE), position, j, window)
        top = tl.maximum(m, tl.max(x, 1))
        shrink = tl.exp2(m - top)
        p = tl.exp2(x - top[:, None])
        v = rows_at(v_cache, place, j, end, SHAPE)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = top
    return acc, m, l


@triton.jit
def nothing_read(ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """The state of rows that have read nothing."""
    acc = tl.zeros((ROWS, SHAPE.wide), tl.float32)
    return acc, tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def first_position(position, window):
    """The first position that a query at `position` reads."""
    return tl.maximum(0, position - window + 1)


# ------------------------------------------------------------------- decode attention


@triton.jit(do_not_specialize=["tables", "lengths", "table_stride", "window"])
def attend_chunk(
    parts,  # acc [seqs, heads, chunks, dim], m and l [seqs, heads, chunks]: float32
    q,  # [seqs, heads, dim]
    cache,  # k_cache, v_cache: [blocks, kv_heads, block_size, dim]
    tables,  # [seqs, max_blocks]
    lengths,  # [seqs]
    strides,  # of q by sequence and by head
    table_stride,  # of tables by sequence
    chunk,
    scale,
    window,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (c, h, s): one KV head with chunk c of what sequence s can see.

    Chunks are cut at multiples of `chunk`, so that neighbours change no result.
    """
    c, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + s)
    first = first_position(length - 1, window)
    edge = (first // chunk + c) * chunk
    start, end = tl.maximum(first, edge), tl.minimum(length, edge + chunk)
    if start >= end:
        return
    g, d = tl.arange(0, ROWS), tl.arange(0, SHAPE.wide)
    inside = (g < SHAPE.group)[:, None] & (d < SHAPE.dim)[None, :]
    heads = h * SHAPE.group + g
    at = s * strides[0] + heads[:, None] * strides[1] + d[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)
    place = tables + s * table_stride, h, tl.num_programs(1)
    limits, state = (start, end, end, 0, end), nothing_read(ROWS, SHAPE)
    acc, m, l = attend(
        state, queries, g, limits, cache, place, scale, before, SHAPE, KEYS
    )
    row = (s * tl.num_programs(1) * SHAPE.group + heads) * tl.num_programs(0) + c
    store_state(parts, row, (acc, m, l), g < SHAPE.group, SHAPE)


@triton.jit
def store_state(parts, row, state, inside, SHAPE: tl.constexpr):
    """Write a state's rows to the given rows of parts."""
    d = tl.arange(0, SHAPE.wide)
    wanted = inside[:, None] & (d < SHAPE.dim)[None, :]
    tl.store(parts[0] + row[:, None] * SHAPE.dim + d[None, :], state[0], mask=wanted)
    tl.store(parts[1] + row, state[1], mask=inside)
    tl.store(parts[2] + row, state[2], mask=inside)


@triton.jit(do_not_specialize=["lengths", "chunks", "window"])
def merge_chunks(
    out,  # [seqs, heads, dim]
    parts,  # acc [seqs, heads, chunks, dim], m and l [seqs, heads, chunks]: float32
    lengths,  # [seqs]
    chunks,
    chunk,
    window,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (h, s): the chunks' acc of one head averaged, with weights 2^m.

    Several chunks at a time: one after the other would wait for memory each time.
    """
    h, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + s)
    count = (length - 1) // chunk - first_position(length - 1, window) // chunk + 1
    d = tl.arange(0, SHAPE.wide)
    row = (s * tl.num_programs(0) + h) * chunks
    acc, top = tl.zeros((SHAPE.wide,), tl.float32), tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (d < SHAPE.dim)[None, :]
        at = parts[0] + (row + part)[:, None] * SHAPE.dim + d[None, :]
        sums = tl.load(at, mask=inside, other=0.0)
        m = tl.load(parts[1] + row + part, mask=part < count, other=float("-inf"))
        l = tl.load(parts[2] + row + part, mask=part < count, other=0.0)
        new = tl.maximum(top, tl.max(m, 0))
        weight, shrink = tl.exp2(m - new), tl.exp2(top - new)
        acc = acc * shrink + tl.sum(weight[:, None] * sums, 0)
        total = total * shrink + tl.sum(weight * l, 0)
        top = new
    at = out + (s * tl.num_programs(0) + h) * SHAPE.dim + d
    tl.store(at, acc / total, mask=d < SHAPE.dim)


def new_parts(*shape: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for states: acc [*shape, dim], m and l [*shape]."""
    acc, m, l = (*shape, dim), shape, shape
    make = torch.empty
    return tuple(
        make(size, dtype=torch.float32, device=like.device) for size in (acc, m, l)
    )


@tuned(
    Config(dict(CHUNK=256, KEYS=64), 4, 3),
    Config(dict(CHUNK=256, KEYS=32), 2, 4),
    Config(dict(CHUNK=512, KEYS=64), 4, 3),
    Config(dict(CHUNK=512, KEYS=128), 4, 2),
    key=kind_of,
)
def decode_attention(
    config: Config,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """As spec.decode_attention: chunks of context by themselves, then merged."""
    (seqs, heads, dim), kv_heads = q.shape, k_cache.shape[1]
    shape, chunk, keys = shape_of(q, k_cache, softcap), *config.sizes.values()
    longest = tables.shape[1] * shape.block_size
    window = min(window or EVERYTHING, EVERYTHING)
    # A window that is not cut at its edges reaches into one chunk more.
    chunks = min(triton.cdiv(longest, chunk), triton.cdiv(window, chunk) + 1)
    parts = new_parts(seqs, heads, chunks, dim=dim, like=q)
    launch(
        attend_chunk,
        (chunks, kv_heads, seqs),
        config,
        parts,
        q,
        (k_cache, v_cache),
        tables,
        lengths,
        q.stride()[:2],
        tables.stride(0),
        chunk,
        scale,
        window,
        shape,
        width(shape.group),
        keys,
    )
    launch(
        merge_chunks,
        (heads, seqs),
        Config(),
        out,
        parts,
        lengths,
        chunks,
        chunk,
        window,
        shape,
        PARTS,
    )


# ------------------------------------------------------------------ prefill attention


@triton.jit(
    do_not_specialize=[
        *("tables", "query_starts", "lengths", "seqs", "table_stride", "window")
    ]
)
def attend_tile(
    out,  # [tokens, heads, dim]
    q,  # [tokens, heads, dim]
    cache,  # k_cache, v_cache: [blocks, kv_heads, block_size, dim]
    tables,  # [seqs, max_blocks]
    query_starts,  # [seqs + 1]
    lengths,  # [seqs]
    strides,  # of q by token and by head
    seqs,
    table_stride,  # of tables by sequence
    scale,
    window,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (tile, h): one KV head with a tile of one sequence's queries.

    Tiles are taken from the last, which read most, to the first.
    """
    tile, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    QUERIES: tl.constexpr = ROWS // SHAPE.group
    s, row, end = rows_of(tile, query_starts, seqs, QUERIES)
    if row >= end:
        return
    position = tl.load(lengths + s) - end + row
    n = tl.minimum(QUERIES, end - row)
    queries = load_queries(q, strides, row, n, h, ROWS, SHAPE)
    place = tables + s.to(tl.int64) * table_stride, h, tl.num_programs(1)
    state = nothing_read(ROWS, SHAPE)
    state = attend_rows(
        state,
        queries,
        position,
        n,
        0,
        window,
        cache,
        place,
        scale,
        SHAPE,
        KEYS,
    )
    store_rows(out, state, row, n, h, SHAPE)


@triton.jit
def load_queries(q, strides, row, n, h, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """n tokens' queries of KV head h, 0 behind them: row r is head r % group of one."""
    r, d = tl.arange(0, ROWS), tl.arange(0, SHAPE.wide)
    inside = (r < n * SHAPE.group)[:, None] & (d < SHAPE.dim)[None, :]
    token, head = row.to(tl.int64) + r // SHAPE.group, h * SHAPE.group + r % SHAPE.group
    at = token * strides[0] + head * strides[1]
    return tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def attend_rows(state, q, position, n, low, window, cache, place, scale, SHAPE, KEYS):
    """The state after all that n queries from `position` on see, from position low on.

    What every row sees needs no mask. To its left the window cuts, to its right the
    order of time; both edges are one loop, since sums may come in any order.
    """
    ROWS: tl.constexpr = q.shape[0]
    at = position + tl.arange(0, ROWS) // SHAPE.group
    last = position + n - 1
    first = tl.maximum(low, first_position(position, window))
    middle = tl.maximum(low, first_position(last, window))
    middle = first + tl.cdiv(middle - first, KEYS) * KEYS
    right = middle + tl.maximum(0, position + 1 - middle) // KEYS * KEYS
    limits = middle, right, right, 0, window
    state = attend(state, q, at, limits, cache, place, scale, every, SHAPE, KEYS)
    limits = first, last + 1, middle, right - middle, window
    return attend(state, q, at, limits, cache, place, scale, causal, SHAPE, KEYS)


@triton.jit
def store_rows(out, state, row, n, h, SHAPE: tl.constexpr):
    """out = acc / l for n tokens of KV head h."""
    acc, m, l = state
    r, d = tl.arange(0, acc.shape[0]), tl.arange(0, SHAPE.wide)
    inside = (r < n * SHAPE.group)[:, None] & (d < SHAPE.dim)[None, :]
    token, head = row.to(tl.int64) + r // SHAPE.group, h * SHAPE.group + r % SHAPE.group
    at = (token * tl.num_programs(1) * SHAPE.group + head) * SHAPE.dim
    tl.store(out + at[:, None] + d[None, :], acc / l[:, None], mask=inside)


TILES = (
    Config(dict(ROWS=64, KEYS=64), 4, 2),
    Config(dict(ROWS=128, KEYS=64), 8, 2),
    Config(dict(ROWS=128, KEYS=64), 8, 3),
    Config(dict(ROWS=128, KEYS=128), 8, 2),
)


@tuned(*TILES, key=kind_of)
def prefill_attention(
    config: Config,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """As spec.prefill_attention: tiles of queries, each over its context in pieces."""
    (tokens, _, _), kv_heads, seqs = q.shape, k_cache.shape[1], len(lengths)
    shape, rows, keys = shape_of(q, k_cache, softcap), *config.sizes.values()
    rows = max(rows, width(shape.group))
    launch(
        attend_tile,
        (tiles(tokens, seqs, rows // shape.group), kv_heads),
        config,
        out,
        q,
        (k_cache, v_cache),
        tables,
        query_starts,
        lengths,
        q.stride()[:2],
        seqs,
        tables.stride(0),
        scale,
        min(window or EVERYTHING, EVERYTHING),
        shape,
        rows,
        keys,
    )


# ------------------------------------------------------------------ cascade attention


@triton.jit(do_not_specialize=["table", "tokens", "shared"])
def attend_prefix(
    parts,  # acc [chunks, tokens, heads, dim], m and l [chunks, tokens, heads]: float32
    q,  # [tokens, heads, dim]
    cache,  # k_cache, v_cache: [blocks, kv_heads, block_size, dim]
    table,  # [max_blocks]: anybody's
    strides,  # of q by token and by head
    tokens,
    shared,
    chunk,
    scale,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (tile, h, c): any queries, side by side, with chunk c of the prefix."""
    h, c = tl.program_id(1), tl.program_id(2)
    QUERIES: tl.constexpr = ROWS // SHAPE.group
    row = tl.program_id(0) * QUERIES
    n = tl.minimum(QUERIES, tokens - row)
    queries = load_queries(q, strides, row, n, h, ROWS, SHAPE)
    end = tl.minimum(shared, (c + 1) * chunk)
    limits, place = (c * chunk, end, end, 0, end), (table, h, tl.num_programs(1))
    r, state = tl.arange(0, ROWS), nothing_read(ROWS, SHAPE)
    state = attend(state, queries, r, limits, cache, place, scale, before, SHAPE, KEYS)
    at = part_rows(c, row, h, tokens, ROWS, SHAPE)
    store_state(parts, at, state, r < n * SHAPE.group, SHAPE)


@triton.jit
def part_rows(c, row, h, tokens, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Where the rows of a tile stand in the parts of chunk c."""
    r, heads = tl.arange(0, ROWS), tl.num_programs(1) * SHAPE.group
    token = c * tokens.to(tl.int64) + row + r // SHAPE.group
    return token * heads + h * SHAPE.group + r % SHAPE.group


@triton.jit
def load_states(parts, chunks, row, n, h, tokens, ROWS, SHAPE):
    """The state of a tile's rows after all chunks."""
    acc, m, l = nothing_read(ROWS, SHAPE)
    r, d = tl.arange(0, ROWS), tl.arange(0, SHAPE.wide)
    inside = r < n * SHAPE.group
    wanted = inside[:, None] & (d < SHAPE.dim)[None, :]
    for c in range(0, chunks):
        at = part_rows(c, row, h, tokens, ROWS, SHAPE)
        top = tl.load(parts[1] + at, mask=inside, other=LOWEST)
        new = tl.maximum(m, top)
        weight, shrink = tl.exp2(top - new), tl.exp2(m - new)
        places = parts[0] + at[:, None] * SHAPE.dim + d[None, :]
        sums = tl.load(places, mask=wanted, other=0.0)
        acc = acc * shrink[:, None] + sums * weight[:, None]
        l = l * shrink + tl.load(parts[2] + at, mask=inside, other=0.0) * weight
        m = new
    return acc, m, l


@triton.jit(
    do_not_specialize=[
        *("tables", "query_starts", "lengths", "seqs", "table_stride", "shared")
    ]
)
def attend_own(
    out,  # [tokens, heads, dim]
    q,  # [tokens, heads, dim]
    cache,  # k_cache, v_cache: [blocks, kv_heads, block_size, dim]
    tables,  # [seqs, max_blocks]
    query_starts,  # [seqs + 1]
    lengths,  # [seqs]
    strides,  # of q by token and by head
    parts,  # acc [chunks, tokens, heads, dim], m and l [chunks, tokens, heads]: float32
    seqs,
    table_stride,  # of tables by sequence
    shared,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,  # rows, keys, and context positions of a chunk
):
    """As attend_tile, from the state in which attend_prefix left these queries.

    An online softmax goes on from any state, so nothing is merged afterwards.
    """
    tile, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = TILE[0]
    KEYS: tl.constexpr = TILE[1]
    QUERIES: tl.constexpr = ROWS // SHAPE.group
    tokens, chunks = tl.load(query_starts + seqs), tl.cdiv(shared, TILE[2])
    s, row, end = rows_of(tile, query_starts, seqs, QUERIES)
    if row >= end:
        return
    position = tl.load(lengths + s) - end + row
    n = tl.minimum(QUERIES, end - row)
    queries = load_queries(q, strides, row, n, h, ROWS, SHAPE)
    place = tables + s.to(tl.int64) * table_stride, h, tl.num_programs(1)
    state = load_states(parts, chunks, row, n, h, tokens, ROWS, SHAPE)
    low, window = shared, position + n  # no window: one that reaches to position 0
    state = attend_rows(
        state,
        queries,
        position,
        n,
        low,
        window,
        cache,
        place,
        scale,
        SHAPE,
        KEYS,
    )
    store_rows(out, state, row, n, h, SHAPE)


@tuned(
    Config(dict(ROWS=64, KEYS=64, CHUNK=1024), 4, 2),
    Config(dict(ROWS=128, KEYS=64, CHUNK=2048), 8, 2),
    key=kind_of,
)
def cascade_attention(
    config: Config,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    shared: int,
    scale: float,
    softcap: float,
) -> None:
    """As spec.cascade_attention: all queries read what is shared, in one dense tile."""
    (tokens, heads, dim), kv_heads, seqs = q.shape, k_cache.shape[1], len(lengths)
    shape, rows, keys, chunk = shape_of(q, k_cache, softcap), *config.sizes.values()
    rows = max(rows, width(shape.group))
    queries, chunks = rows // shape.group, triton.cdiv(shared, chunk)
    parts = new_parts(chunks, tokens, heads, dim=dim, like=q)
    strides, cache = q.stride()[:2], (k_cache, v_cache)
    launch(
        attend_prefix,
        (triton.cdiv(tokens, queries), kv_heads, chunks),
        config,
        parts,
        q,
        cache,
        tables,
        strides,
        tokens,
        shared,
        chunk,
        scale,
        shape,
        rows,
        keys,
    )
    launch(
        attend_own,
        (tiles(tokens, seqs, queries), kv_heads),
        config,
        out,
        q,
        cache,
        tables,
        query_starts,
        lengths,
        strides,
        parts,
        seqs,
        tables.stride(0),
        shared,
        scale,
        shape,
        (rows, keys, chunk),
    )
