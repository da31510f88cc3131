# Exercise bug6 · Paged attention: find the bug.
#
# This is kernels/cpu.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Short conversations are answered as always. Once a conversation is longer than a
#     few hundred tokens, its answers become vaguer than those of another engine on the
#     same weights: no error, no NaN, and prompts of any length are read correctly.
#     Seeds, batches and threads make no difference.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug6    the engine's own tests on your file, and one hint
#     make hint N=bug6        a hint alone
#     make reset N=bug6       this file as it was; yours is kept beside it
#
# The idea is in book/06_attention.ipynb.
#
# Made from kernels/cpu.py by exercises/tools.py. Untouched: fa27c086a707

"""The kernels of spec.py in numba: same names, arguments, variables and KV layout.

It knows float32 arrays and the processor's vectors, and nothing of models or requests.
Nothing compiles at import: a kernel compiles, or loads from the user's cache directory,
on its first call, and `compile_all` does so for all. Built in chapter 06, and in 01.

Each kernel is `for_each` over rows or tasks, in torch's own threads. A product's
operand is a triple (array, place, stride): rows that lie `stride` numbers apart in the
array's memory, the first at `place`.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from .spec import empty_kv as empty_kv
from .threads import for_each, get_num_threads, load_fork
from .threads import set_num_threads as set_num_threads
from .tiles import (
    COLUMNS,
    HEADS,
    LANES,
    LINE,
    MATH,
    ROWS,
    TOKENS,
    dot_tiles,
    inline,
    largest_of,
    narrow_tile,
    power_of_two,
    prefetch,
    product_tile,
    stream_tile,
    stretch,
    take_ticket,
    wide_tile,
)

CHUNK = 256  # decode: context tokens of one task; fixed, so neighbours change no result
VALUES = 8  # decode: context tokens whose values are weighed at a time
KEYS = 64  # prefill: context tokens that are copied and multiplied at a time
QUERIES = 96  # prefill: (query, head) rows of one task
# Products: with fewer rows memory is the limit, and hardware streams alone.
FEW = 2 if LANES == 16 else 4
ROWS_AT_ONCE = 8  # elementwise kernels: rows that a thread takes from the counter
SMALL = 8192  # elementwise kernels: below this many numbers a second thread costs more

Array = np.ndarray
ZERO, HALF, ONE, TWO = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0))
MINUS_INFINITY = np.float32(-np.inf)


# ------------------------------------------------------------- compiling and caching


def cache_dir() -> Path:
    """Where compiled kernels live: one folder per source, compiler and processor.

    Under $PAGEDATTN_CACHE, else $XDG_CACHE_HOME/pagedattn, else ~/.cache/pagedattn.
    """
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("PAGEDATTN_CACHE") or Path(xdg) / "pagedattn"
    cpu = numba.config.CPU_NAME or binding.get_host_cpu_name()
    features = numba.config.CPU_FEATURES or binding.get_host_cpu_features().flatten()
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    parts = [*sources, numba.__version__, llvmlite.__version__, sys.version, features]
    digest = hashlib.sha256("\0".join([*parts, cpu]).encode()).hexdigest()
    return Path(root) / "kernels" / f"{cpu}-{digest[:12]}"


class Kernel:
    """A parallel numba function that is compiled or loaded when it is first called."""

    def __init__(self, body: Callable[..., None], signature: str) -> None:
        self.body = body
        self.signature = signature
        self.__doc__ = body.__doc__

    @functools.cached_property
    def compiled(self) -> Callable[..., None]:
        """The machine code. numba reads its cache folder when the function is made."""
        load_fork()
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_dir())
        try:
            return njit(
                self.signature,
                cache=True,
                nogil=True,
                error_model="numpy",
                fastmath=MATH,
            )(self.body)
        finally:
            numba.config.CACHE_DIR = before

    def __call__(self, *args: Tensor | Array | float | int) -> None:
        plain = [native(a) if isinstance(a, Tensor) else a for a in args]
        self.compiled(*plain, get_num_threads())


def kernel(signature: str) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a function as a kernel of one signature."""
    return lambda body: Kernel(body, signature)


def native(x: Tensor) -> Array:
    """The numpy array over the memory of x, which costs a microsecond to make: whoever
    passes a tensor to many kernels makes it once."""
    return x.numpy()


# -------------------------------------------------------------------- small functions


@inline
def exp(x: float) -> float:
    """e^x in float32, relative error 1e-7, written so that loops over it vectorise.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial (Cephes), 2^n a bit field.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + HALF)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + ONE) * power_of_two(np.int32(n))


@inline
def enough(threads: int, size: int) -> int:
    """One thread where there is little to do, else all."""
    return threads if size >= SMALL else 1


@inline
def tanh(x: float) -> float:
    """1 - 2 / (e^2x + 1)."""
    return ONE - TWO / (exp(x + x) + ONE)


# ------------------------------------------------------------------- matrix products


def pack(weight: Tensor) -> Tensor:
    """As spec.pack(weight, COLUMNS), by numpy, which turns matrices over several times
    as fast."""
    n, k = weight.shape
    if n % COLUMNS:
        weight = pad(weight, (0, 0, 0, -n % COLUMNS))
    rows = weight.view(-1, COLUMNS, k)
    panels = weight.new_empty(len(rows), k, COLUMNS)
    np.copyto(panels.numpy(), rows.numpy().transpose(0, 2, 1))
    return panels


@kernel("void(float32[:, ::1], float32[:, :], float32[:, :, ::1], int64)")
def linear(out: Array, x: Array, panels: Array, threads: int) -> None:
    """As spec.linear, a panel of weights at a time: each is read from memory once.

    Every sum runs over k in order: a row's outputs are the same to the last bit
    whatever rows stand beside it. Floor: the weights' bytes for few rows, 2 rows N K
    FLOPs for many. Measured in whole steps: 63 to 76 % of it alone, 86 to 91 % at 64
    rows.
    """
    for_each(len(panels), 1, threads, linear_panel, (out, x, panels, threads))


@inline
def linear_panel(p: int, out: Array, x: Array, panels: Array, threads: int) -> None:
    """One panel of linear; threads take them in turns, so the next but one is ours."""
    multiply_panel(p, out, x, panels, min(p + threads, len(panels) - 1))


@inline
def multiply_panel(p: int, out: Array, x: Array, panels: Array, then: int) -> None:
    """The outputs of panel p, for all rows of x, while panel `then` comes from memory.

    Each tile of rows asks for its share of it.
    """
    (rows, depth), n = x.shape, out.shape[1]
    size = depth * COLUMNS
    first, lda = p * COLUMNS, x.strides[0] // x.itemsize
    columns = min(COLUMNS, n - first)
    if rows < FEW or columns < COLUMNS:
        above, panel = (x, 0, lda), (panels, p * size, COLUMNS)
        product(rows, columns, depth, above, panel, (out, first, n), 0)
        return
    tiles = -(-rows // ROWS)
    high, step = -(-rows // tiles), -(-COLUMNS // tiles)
    ahead = then * size
    for i in range(0, rows, high):
        above, here = (x, i * lda, lda), (out, i * n + first, n)
        beside = (panels, p * size, COLUMNS)
        numbers = (depth, ahead, step)
        stream_tile(min(high, rows - i), above, beside, here, numbers)
        ahead += depth * step


# ------------------------------------------------------------------------ writing KV


@kernel(
    "void(float32[:, :, :], float32[:, :, :], float32[:, :, :, ::1],"
    " float32[:, :, :, ::1], int64[::1], int64)"
)
def write_kv(
    key: Array, value: Array, k_cache: Array, v_cache: Array, slots: Array, threads: int
) -> None:
    """As spec.write_kv."""
    threads = enough(threads, key.size)
    for_each(
        len(key),
        ROWS_AT_ONCE,
        threads,
        write_token,
        (key, value, k_cache, v_cache, slots),
    )


@inline
def write_token(
    t: int, key: Array, value: Array, k_cache: Array, v_cache: Array, slots: Array
) -> None:
    """One token's keys and values, all heads."""
    _, kv_heads, block_size, dim = k_cache.shape
    block, offset = slots[t] // block_size, slots[t] % block_size
    for h in range(kv_heads):
        k, v = head(key, t, h), head(value, t, h)
        for d in range(dim):
            k_cache[block, h, offset, d] = k[d]
        for d in range(dim):
            v_cache[block, h, offset, d] = v[d]


@inline
def head(x: Array, t: int, h: int) -> Array:
    """x[t, h] of an array whose last dimension is contiguous, known to be so."""
    start = (t * x.strides[0] + h * x.strides[1]) // x.itemsize
    return stretch(x, start, x.shape[2])


# ------------------------------------------------------------------ decode attention


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :], float32[:, :, :, ::1],"
    " float32[:, :, :, ::1], int32[:, ::1], int32[::1], float32, int64, float32,"
    " int64)"
)
def decode_attention(
    out: Array,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    tables: Array,
    lengths: Array,
    scale: float,
    window: int,
    softcap: float,
    threads: int,
) -> None:
    """As spec.decode_attention: chunks of context by themselves, then merged.

    Floor: every key and value once. Measured in whole steps: 40 % of it with 64
    contexts of 90 tokens; by itself, 80 % and more from 250 tokens on.
    """
    seqs, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    firsts = first_chunks(lengths, window)
    parts = firsts[seqs] * kv_heads
    acc = np.empty((parts, group, dim), np.float32)
    m = np.empty((parts, group), np.float32)
    l = np.empty((parts, group), np.float32)
    finished = np.zeros(seqs * kv_heads, np.int64)
    order = chunks_in_step(firsts, kv_heads)
    context = (k_cache, v_cache, tables, lengths, firsts, order, finished)
    formula = (scale, window, softcap)
    for_each(parts, 1, threads, attend_chunk, (out, q, (acc, m, l), context, formula))


@inline
def first_chunks(lengths: Array, window: int) -> Array:
    """firsts[s] = number of context chunks of the sequences before s: [seqs + 1]."""
    firsts = np.zeros(len(lengths) + 1, np.int64)
    for s in range(len(lengths)):
        start = first_position(lengths[s] - 1, window)
        firsts[s + 1] = firsts[s] + (lengths[s] - 1) // CHUNK - start // CHUNK + 1
    return firsts


@inline
def chunks_in_step(firsts: Array, kv_heads: int) -> Array:
    """The parts in order of (chunk, KV head, sequence): [chunks * kv_heads].

    A prefix that sequences share is in the same blocks and chunks of all of them, and
    so is read from memory once, and then by all while it is in the cache.
    """
    order = np.empty(firsts[-1] * kv_heads, np.int64)
    i = chunk = 0
    while i < len(order):
        for h in range(kv_heads):
            for s in range(len(firsts) - 1):
                if firsts[s] + chunk < firsts[s + 1]:
                    order[i] = (firsts[s] + chunk) * kv_heads + h
                    i += 1
        chunk += 1
    return order


@inline
def first_position(p: Array, window: int) -> int:
    """The first position that a query at position p reads."""
    return max(0, p - window + 1) if window else 0


@inline
def attend_chunk(
    task: int, out: Array, q: Array, sums: tuple, context: tuple, formula: tuple
) -> None:
    """One KV head with one chunk of one sequence's context.

    Whoever finishes the last chunk of a (sequence, KV head) merges them.
    """
    acc, m, l = sums
    k_cache, v_cache, tables, lengths, firsts, order, finished = context
    scale, window, softcap = formula
    part = order[task]
    kv_heads, (_, group, dim) = k_cache.shape[1], acc.shape
    chunk, h = part // kv_heads, part % kv_heads
    s = np.searchsorted(firsts, chunk, side="right") - 1
    first = first_position(lengths[s] - 1, window)
    edge = (first // CHUNK + chunk - firsts[s]) * CHUNK
    start, end = max(first, edge), min(lengths[s], edge + CHUNK)
    queries = np.empty((group, dim), np.float32)
    p = np.empty((group, CHUNK + TOKENS), np.float32)  # a last tile may overshoot
    scale_queries(queries, q, s, h * group, scale)
    scores(p, queries, k_cache, v_cache, tables[s], h, start, end)
    for g in range(group):
        row = stretch(p, g * p.shape[1], end - start)
        m[part, g], l[part, g] = softmax_part(row, softcap)
    weigh(acc[part], p, v_cache, tables[s], h, start, end)
    if take_ticket(finished, s * kv_heads + h) + 1 == firsts[s + 1] - firsts[s]:
        merge_chunks(out, acc, m, l, firsts, s, h, kv_heads)


@inline
def scale_queries(queries: Array, q: Array, t: int, h: int, scale: float) -> None:
    """queries[g] = scale * q[t, h + g]."""
    for g in range(len(queries)):
        row = head(q, t, h + g)
        for d in range(len(row)):
            queries[g, d] = scale * row[d]


@inline
def scores(
    p: Array,
    queries: Array,
    k_cache: Array,
    v_cache: Array,
    table: Array,
    h: int,
    start: int,
    end: int,
) -> None:
    """p[g, t - start] = queries[g] . k[t] for the positions t from start to end."""
    block_size, dim = k_cache.shape[2:]
    t = start
    while t < end:
        room = block_size - t % block_size
        n = min(room, end - t)
        k0 = place(k_cache, table, h, t)
        if t + n < end:
            ahead, a0 = k_cache, place(k_cache, table, h, t + n)
        else:
            ahead, a0 = v_cache, place(v_cache, table, h, start)
        # A whole tile may reach over unused slots, but not over the end of the block.
        tiles = min(-(-n // TOKENS), room // TOKENS) if dim % LANES == 0 else 0
        score_tiles(p, queries, k_cache, k0, t - start, tiles, ahead, a0)
        for i in range(tiles * TOKENS, n):
            k, column = k0 + i * dim, t - start + i
            for g in range(len(queries)):
                p[g, column] = dot(queries, g * dim, k_cache, k, dim)
        t += n


@inline
def place(cache: Array, table: Array, h: int, t: int) -> int:
    """Where position t's row of KV head h starts in the cache's memory."""
    _, kv_heads, block_size, dim = cache.shape
    block, offset = table[t // block_size], t % block_size
    return ((block * kv_heads + h) * block_size + offset) * dim


@inline
def score_tiles(
    p: Array,
    queries: Array,
    keys: Array,
    k0: int,
    column: int,
    tiles: int,
    ahead: Array,
    a0: int,
) -> None:
    """Scores of every query with tiles * TOKENS keys of one block, while as many rows
    of `ahead` are fetched from a0 on: blocks lie anywhere, so hardware can't."""
    group, dim = queries.shape
    for tile in range(tiles):
        first = tile * TOKENS
        fetch(ahead, a0 + first * dim, TOKENS * dim)
        for g in range(0, group, HEADS):
            scores = (p, g * p.shape[1] + column + first, p.shape[1])
            rows, keys4 = (queries, g * dim, dim), (keys, k0 + first * dim, dim)
            dot_tiles(min(HEADS, group - g), rows, keys4, scores, (dim, 1))


@inline
def fetch(array: Array, start: int, n: int) -> None:
    """Ask memory for n numbers of the array, a few at a time: more requests than the
    processor keeps would hold up what follows."""
    for d in range(0, n, LINE):
        prefetch(array, start + d)


@inline
def dot(a: Array, a0: int, b: Array, b0: int, n: int) -> float:
    """Sum of a[a0 + d] * b[b0 + d], d < n, in flat memory."""
    a, b = stretch(a, a0, n), stretch(b, b0, n)
    total = ZERO
    for d in range(n):
        total += a[d] * b[d]
    return total


@inline
def softmax_part(p: Array, softcap: float) -> tuple[float, float]:
    """p = e^(cap(p) - m) for m = max cap(p); returns (m, sum of p)."""
    cap(p, softcap)
    m = largest(p)
    return m, powers(p, m)


@inline
def cap(p: Array, softcap: float) -> None:
    """p = softcap tanh(p / softcap), unless softcap is 0."""
    if softcap != ZERO:
        for t in range(len(p)):
            p[t] = softcap * tanh(p[t] / softcap)


@inline
def largest(p: Array) -> float:
    """The maximum; -inf of nothing."""
    whole = len(p) - len(p) % LANES
    m = largest_of(p, whole) if whole else MINUS_INFINITY
    for t in range(whole, len(p)):
        m = max(m, p[t])
    return m


@inline
def powers(p: Array, m: float) -> float:
    """p = e^(p - m); returns their sum."""
    total = ZERO
    for t in range(len(p)):
        p[t] = exp(p[t] - m)
        total += p[t]
    return total


@inline
def weigh(
    acc: Array, p: Array, v_cache: Array, table: Array, h: int, start: int, end: int
) -> None:
    """acc[g] = sum of p[g, t - start] * v[t] over the positions t from start to end."""
    block_size, dim = v_cache.shape[2:]
    t = start
    while t < end:
        n = min(VALUES - t % VALUES, block_size - t % block_size, end - t)
        ahead = min(t + 2 * VALUES, end - 1)
        fetch(v_cache, place(v_cache, table, h, ahead), n * dim)
        weights, rows = (
            (p, t - start, p.shape[1]),
            (v_cache, place(v_cache, table, h, t), dim),
        )
        product(len(acc), dim, n, weights, rows, (acc, 0, dim), t - start)
        t += n


@inline
def product(
    rows: int, columns: int, depth: int, a: tuple, b: tuple, c: tuple, keep: int
) -> None:
    """c = a @ b, or c += a @ b where keep is not 0; depth counts b's rows."""
    (b_array, b0, ldb), (c_array, c0, ldc) = b, c
    whole = columns - columns % LANES
    for i in range(0, rows, ROWS):
        n, above = min(ROWS, rows - i), (a[0], a[1] + i * a[2], a[2])
        j = 0
        while j < whole:
            beside, here = (b_array, b0 + j, ldb), (c_array, c0 + i * ldc + j, ldc)
            if 2 * n <= ROWS and j + 2 * COLUMNS <= whole:
                wide_tile(n, above, beside, here, (depth, keep))
                j += 2 * COLUMNS
            elif j + COLUMNS <= whole:
                product_tile(n, above, beside, here, (depth, keep))
                j += COLUMNS
            else:
                narrow_tile(n, above, beside, here, (depth, keep))
                j += LANES
    if whole < columns:
        product_rest(rows, whole, columns, depth, a, b, c, keep)


@inline
def product_rest(
    rows: int,
    first: int,
    columns: int,
    depth: int,
    a: tuple,
    b: tuple,
    c: tuple,
    keep: int,
) -> None:
    """product, for the columns from `first` on, which fill no tile."""
    (a_array, a0, lda), (b_array, b0, ldb), (c_array, c0, ldc) = a, b, c
    for i in range(rows):
        row = stretch(a_array, a0 + i * lda, depth)
        sums = stretch(c_array, c0 + i * ldc, columns)
        for j in range(first, columns):
            column = stretch(b_array, b0 + j, depth * ldb)
            total = sums[j] if keep else ZERO
            for k in range(depth):
                total += row[k] * column[k * ldb]
            sums[j] = total


@inline
def merge_chunks(
    out: Array,
    acc: Array,
    m: Array,
    l: Array,
    firsts: Array,
    s: int,
    h: int,
    kv_heads: int,
) -> None:
    """One KV head of out[s]: its chunks' acc / l averaged with weights l e^m."""
    _, group, dim = acc.shape
    first, end = firsts[s] * kv_heads + h, firsts[s + 1] * kv_heads + h
    for g in range(group):
        row = out[s, h * group + g]
        row[:] = ZERO
        top, total = MINUS_INFINITY, ZERO
        for part in range(first, end, kv_heads):
            top = max(top, m[part, g])
        for part in range(first, end, kv_heads):
            weight = np.exp2(m[part, g] - top)
            total += weight * l[part, g]
            for d in range(dim):
                row[d] += weight * acc[part, g, d]
        for d in range(dim):
            row[d] /= total


# ----------------------------------------------------------------- prefill attention


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :], float32[:, :, :, ::1],"
    " float32[:, :, :, ::1], int32[:, ::1], int32[::1], int32[::1],"
    " float32, int64, float32, int64)"
)
def prefill_attention(
    out: Array,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    tables: Array,
    query_starts: Array,
    lengths: Array,
    scale: float,
    window: int,
    softcap: float,
    threads: int,
) -> None:
    """As spec.prefill_attention: tiles of queries, each over its context in pieces.

    Floor: 4 FLOPs for each (query, key) pair and head dimension. Measured: 33 % of it
    with prompts of 150 tokens.
    """
    firsts = first_tiles(query_starts, q.shape[1] // k_cache.shape[1])
    tasks = firsts[-1] * k_cache.shape[1]
    context = (k_cache, v_cache, tables, query_starts, lengths, firsts)
    formula = (scale, window, softcap)
    for_each(tasks, 1, threads, attend_tile, (out, q, context, formula))


@inline
def tile_queries(group: int) -> int:
    """Queries of one task, so that it has about QUERIES rows."""
    return max(1, QUERIES // group)


@inline
def first_tiles(query_starts: Array, group: int) -> Array:
    """firsts[s] = number of query tiles of the sequences before s: [seqs + 1]."""
    firsts = np.zeros(len(query_starts), np.int64)
    for s in range(len(query_starts) - 1):
        n = query_starts[s + 1] - query_starts[s]
        firsts[s + 1] = firsts[s] + -(-n // tile_queries(group))
    return firsts


@inline
def attend_tile(
    task: int, out: Array, q: Array, context: tuple, formula: tuple
) -> None:
    """One KV head with one tile of queries; the last tiles, the longest, come first."""
    k_cache, v_cache, tables, query_starts, lengths, firsts = context
    kv_heads = k_cache.shape[1]
    group = q.shape[1] // kv_heads
    left = firsts[-1] * kv_heads - 1 - task
    tile, h = left // kv_heads, left % kv_heads
    s = np.searchsorted(firsts, tile, side="right") - 1
    row = query_starts[s] + (tile - firsts[s]) * tile_queries(group)
    n = min(tile_queries(group), query_starts[s + 1] - row)
    position = lengths[s] - query_starts[s + 1] + row
    queries = np.empty((n * group, q.shape[2]), np.float32)
    for i in range(n):
        scale_queries(queries[i * group :][:group], q, row + i, h * group, formula[0])
    acc, l = attend_rows(
        queries, group, k_cache, v_cache, tables[s], h, position, formula
    )
    for r in range(n * group):
        result = head(out, row + r // group, h * group + r % group)
        for d in range(len(result)):
            result[d] = acc[r, d] / l[r]


@inline
def attend_rows(
    queries: Array,
    group: int,
    k_cache: Array,
    v_cache: Array,
    table: Array,
    h: int,
    position: int,
    formula: tuple,
) -> tuple[Array, Array]:
    """(acc, l) of some rows; every `group` of them stand one position further on."""
    _, window, softcap = formula
    rows, dim = queries.shape
    wide = -(-dim // LANES) * LANES
    keys = np.empty((KEYS // COLUMNS, dim, COLUMNS), np.float32)  # transposed
    values = np.zeros((KEYS, wide), np.float32)
    p = np.empty((rows, KEYS), np.float32)
    acc = np.zeros((rows, wide), np.float32)
    m, l = np.full(rows, MINUS_INFINITY), np.zeros(rows, np.float32)
    end = position + rows // group
    for start in range(first_position(position, window), end, KEYS):
        n = min(KEYS, end - start)
        copy_context(keys, values, k_cache, v_cache, table, h, start, n)
        for panel in range(-(-n // COLUMNS)):
            column = (keys, panel * dim * COLUMNS, COLUMNS)
            target = (p, panel * COLUMNS, KEYS)
            product(rows, COLUMNS, dim, (queries, 0, dim), column, target, 0)
        for r in range(rows):
            at = position + r // group
            low = max(0, first_position(at, window) - start)
            high = min(n, at + 1 - start)
            row = stretch(p, r * KEYS, n)
            m[r], l[r] = softmax_step(row, low, high, acc[r], m[r], l[r], softcap)
        product(rows, wide, n, (p, 0, KEYS), (values, 0, wide), (acc, 0, wide), 1)
    return acc, l


@inline
def copy_context(
    keys: Array,
    values: Array,
    k_cache: Array,
    v_cache: Array,
    table: Array,
    h: int,
    start: int,
    n: int,
) -> None:
    """Position start + t's, t < n: keys[t / COLUMNS, :, t % COLUMNS] and values[t]."""
    dim = k_cache.shape[3]
    for t in range(n):
        at = place(k_cache, table, h, start + t)
        k, v = stretch(k_cache, at, dim), stretch(v_cache, at, dim)
        column = stretch(
            keys, t // COLUMNS * dim * COLUMNS + t % COLUMNS, dim * COLUMNS
        )
        for d in range(dim):
            column[d * COLUMNS] = k[d]
        for d in range(dim):
            values[t, d] = v[d]


@inline
def softmax_step(
    p: Array, low: int, high: int, acc: Array, m: float, l: float, softcap: float
) -> tuple[float, float]:
    """One row of the online softmax: p becomes weights, 0 outside low .. high.

    Where the maximum grows from m, what acc and l hold shrinks by e^(m - new m).
    """
    seen = max(low, high)
    p[:low] = ZERO
    p[seen:] = ZERO
    part = stretch(p, low, seen - low)
    cap(part, softcap)
    top = max(m, largest(part))
    if top == m:
        return m, l + powers(part, m)
    shrink = exp(m - top)
    acc *= shrink
    return top, l * shrink + powers(part, top)


# -------------------------------------------------- norms, rotation and activations


@kernel("void(float32[:, :, :], float32[:, :, :], float32[::1], float32, int64)")
def _rms_norm(out: Array, x: Array, weight: Array, eps: float, threads: int) -> None:
    threads = enough(threads, x.size)
    for_each(len(x), ROWS_AT_ONCE, threads, norm_token, (out, x, weight, eps))


@inline
def norm_token(t: int, out: Array, x: Array, weight: Array, eps: float) -> None:
    """RMSNorm of x[t, h] for every h."""
    for h in range(x.shape[1]):
        row, result = head(x, t, h), head(out, t, h)
        total = ZERO
        for d in range(len(row)):
            total += row[d] * row[d]
        factor = ONE / np.sqrt(total / np.float32(len(row)) + eps)
        for d in range(len(row)):
            result[d] = row[d] * factor * weight[d]


@kernel(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32,"
    " int64)"
)
def add_rms_norm(
    out: Array, residual: Array, x: Array, weight: Array, eps: float, threads: int
) -> None:
    """As spec.add_rms_norm. Floor: four passes over memory; 56 % of it at 64 rows."""
    threads = enough(threads, x.size)
    for_each(
        len(x), ROWS_AT_ONCE, threads, add_norm_row, (out, residual, x, weight, eps)
    )


@inline
def add_norm_row(
    t: int, out: Array, residual: Array, x: Array, weight: Array, eps: float
) -> None:
    """residual[t] += x[t]; out[t] = RMSNorm(residual[t])."""
    out, residual, x = out[t], residual[t], x[t]
    total = ZERO
    for d in range(len(x)):
        residual[d] += x[d]
        total += residual[d] * residual[d]
    factor = ONE / np.sqrt(total / np.float32(len(x)) + eps)
    for d in range(len(x)):
        out[d] = residual[d] * factor * weight[d]


@kernel("void(float32[:, :, :], float32[:, :, :], int64[::1], float32[:, ::1], int64)")
def rotary(q: Array, k: Array, positions: Array, cos_sin: Array, threads: int) -> None:
    """As spec.rotary."""
    threads = enough(threads, q.size)
    for_each(len(q), ROWS_AT_ONCE, threads, rotate_token, (q, k, positions, cos_sin))


@inline
def rotate_token(t: int, q: Array, k: Array, positions: Array, cos_sin: Array) -> None:
    """One token's queries and keys."""
    rotate_heads(q, cos_sin[positions[t]], t)
    rotate_heads(k, cos_sin[positions[t]], t)


@inline
def rotate_heads(x: Array, cos_sin: Array, t: int) -> None:
    """Turn the pairs (d, d + half) of x[t, h] for every h."""
    half = len(cos_sin) // 2
    cos, sin = stretch(cos_sin, 0, half), stretch(cos_sin, half, half)
    for h in range(x.shape[1]):
        row = head(x, t, h)
        first, second = stretch(row, 0, half), stretch(row, half, half)
        for d in range(half):
            a, b = first[d], second[d]
            first[d] = a * cos[d] - b * sin[d]
            second[d] = b * cos[d] + a * sin[d]


@kernel(
    "void(float32[:, :, :], float32[:, :, :], float32[:, :, :], int64[::1],"
    " float32[:, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[::1],"
    " int64)"
)
def rotary_write(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    cos_sin: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    threads: int,
) -> None:
    """As spec.rotary_write, token by token, while its keys are at hand.

    Floor: q, k and v read and written once. 13 % of it at 64 rows: slots lie anywhere,
    and the product left half of each row in the other core's cache.
    """
    threads = enough(threads, q.size)
    turn, write = (q, k, positions, cos_sin), (k, v, k_cache, v_cache, slots)
    for_each(len(q), ROWS_AT_ONCE, threads, rotate_and_write_token, (turn, write))


@inline
def rotate_and_write_token(t: int, turn: tuple, write: tuple) -> None:
    """rotate_token, then write_token."""
    q, k, positions, cos_sin = turn
    rotate_token(t, q, k, positions, cos_sin)
    k, v, k_cache, v_cache, slots = write
    write_token(t, k, v, k_cache, v_cache, slots)


@kernel("void(float32[:, ::1], float32[:, ::1], int64)")
def silu_mul(out: Array, gate_up: Array, threads: int) -> None:
    """As spec.silu_mul."""
    threads = enough(threads, out.size)
    for_each(len(out), ROWS_AT_ONCE, threads, silu_row, (out, gate_up))


@inline
def silu_row(t: int, out: Array, gate_up: Array) -> None:
    """One row of silu_mul."""
    n = out.shape[1]
    silu(out[t], gate_up[t, :n], gate_up[t, n:])


@inline
def silu(out: Array, gate: Array, up: Array) -> None:
    """out = gate / (1 + e^-gate) * up; `out` may be `gate`."""
    for d in range(len(out)):
        out[d] = gate[d] / (ONE + exp(-gate[d])) * up[d]


@kernel("void(float32[:, ::1], float32[:, ::1], int64)")
def gelu_tanh_mul(out: Array, gate_up: Array, threads: int) -> None:
    """As spec.gelu_tanh_mul."""
    threads = enough(threads, out.size)
    for_each(len(out), ROWS_AT_ONCE, threads, gelu_row, (out, gate_up))


@inline
def gelu_row(t: int, out: Array, gate_up: Array) -> None:
    """One row of gelu_tanh_mul."""
    n = out.shape[1]
    gelu_tanh(out[t], gate_up[t, :n], gate_up[t, n:])


@inline
def gelu_tanh(out: Array, gate: Array, up: Array) -> None:
    """out = gate / 2 * (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) * up."""
    for d in range(len(out)):
        x = gate[d]
        inner = np.float32(0.79788456) * (x + np.float32(0.044715) * x * x * x)
        out[d] = HALF * x * (ONE + tanh(inner)) * up[d]


@kernel("void(float32[:, ::1], float32[:, :], float32[:, :, ::1], int64)")
def silu_linear(out: Array, x: Array, panels: Array, threads: int) -> None:
    """As spec.silu_linear: what two panels give meets while it is in the cache.

    Floor: linear's. 69 % of it alone, 90 % at 64 rows.
    """
    for_each(len(panels) // 2, 1, threads, silu_panel, (out, x, panels, threads))


@inline
def silu_panel(p: int, out: Array, x: Array, panels: Array, threads: int) -> None:
    """16 columns of out: the gate's panel, the up's panel, and their silu."""
    gate, up = gate_and_up(p, x, panels, threads)
    for t in range(len(out)):
        result = stretch(out, t * out.shape[1] + p * COLUMNS, COLUMNS)
        first = t * COLUMNS
        silu(result, stretch(gate, first, COLUMNS), stretch(up, first, COLUMNS))


@inline
def gate_and_up(p: int, x: Array, panels: Array, threads: int) -> tuple[Array, Array]:
    """x times panel p, and times its partner in the other half: [rows, 16] each."""
    gate = np.empty((len(x), COLUMNS), np.float32)
    up = np.empty((len(x), COLUMNS), np.float32)
    half = len(panels) // 2
    multiply_panel(0, gate, x, panels[p:], half)
    multiply_panel(0, up, x, panels[half + p :], min(threads, half - 1 - p) - half)
    return gate, up


@kernel("void(float32[:, ::1], float32[:, :], float32[:, :, ::1], int64)")
def gelu_tanh_linear(out: Array, x: Array, panels: Array, threads: int) -> None:
    """As spec.gelu_tanh_linear."""
    for_each(len(panels) // 2, 1, threads, gelu_tanh_panel, (out, x, panels, threads))


@inline
def gelu_tanh_panel(p: int, out: Array, x: Array, panels: Array, threads: int) -> None:
    """As silu_panel."""
    gate, up = gate_and_up(p, x, panels, threads)
    for t in range(len(out)):
        result = stretch(out, t * out.shape[1] + p * COLUMNS, COLUMNS)
        first = t * COLUMNS
        gelu_tanh(result, stretch(gate, first, COLUMNS), stretch(up, first, COLUMNS))


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """As spec.rms_norm, for [rows, dim] or [tokens, heads, dim]."""
    if x.ndim == 2:
        out, x = out[:, None], x[:, None]
    _rms_norm(out, x, weight, eps)


# ------------------------------------------------------------------- compiling all


def compile_all(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compile every kernel, or load it from the cache, and report (name, done, of)."""
    kernels = {k: v for k, v in globals().items() if isinstance(v, Kernel)}
    for done, (name, one) in enumerate(kernels.items()):
        if progress:
            progress(name.strip("_"), done, len(kernels))
        _ = one.compiled
    if progress:
        progress("", len(kernels), len(kernels))
