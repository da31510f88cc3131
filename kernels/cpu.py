"""The kernels of spec.py in numba: same names, arguments, variables and KV layout.

It knows float32 arrays and the processor's vectors, and nothing of models or requests.
Nothing compiles at import: a kernel compiles, or loads from the user's cache directory,
on its first call, and `compile_all` does so for all. Chapter 04 builds it.

Each kernel is a thin parallel loop around plain functions, because numba's parallel
compiler is slow. Attention's work is dealt out task by task from one atomic counter, so
that a core that is busy elsewhere delays one task and not half of the work.
"""

import functools
import hashlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import binding
from numba import njit, prange
from torch import Tensor

from .spec import empty_kv as empty_kv
from .tiles import (
    COLUMNS,
    HEADS,
    LANES,
    MATH,
    ROWS,
    TOKENS,
    dot_tile,
    inline,
    power_of_two,
    prefetch,
    product_tile,
    stretch,
    take_ticket,
)

CHUNK = 256  # decode: context tokens of one task; fixed, so neighbours change no result
KEYS = 64  # prefill: context tokens that are copied and multiplied at a time
QUERIES = 96  # prefill: (query, head) rows of one task
LINE = 16  # floats in a cache line of 64 bytes
SMALL = 8192  # elementwise kernels: below this many numbers a second thread costs more

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


def set_num_threads(n: int) -> None:
    """Use n threads for these kernels and for torch, in the calling thread.

    Both counts belong to the thread that sets them: call this in the thread that runs
    the step loop. n is at most the number of cores that numba saw at its start.
    """
    numba.set_num_threads(n)  # starts numba's pool, which sets OpenMP's count: go first
    torch.set_num_threads(n)


class Kernel:
    """A parallel numba function that is compiled or loaded when it is first called."""

    def __init__(self, body: Callable[..., None], signature: str) -> None:
        self.body = body
        self.signature = signature
        self.__doc__ = body.__doc__

    @functools.cached_property
    def compiled(self) -> Callable[..., None]:
        """The machine code. numba reads its cache folder when the function is made."""
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_dir())
        try:
            return njit(
                self.signature,
                cache=True,
                nogil=True,
                parallel=True,
                error_model="numpy",
                fastmath=MATH,
            )(self.body)
        finally:
            numba.config.CACHE_DIR = before

    def __call__(self, *args: Tensor | float | int) -> None:
        self.compiled(*[a.numpy() if isinstance(a, Tensor) else a for a in args])


def kernel(signature: str) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a function as a kernel of one signature."""
    return lambda body: Kernel(body, signature)


# -------------------------------------------------------------------- small functions


@inline
def exp(x):
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
def tanh(x):
    """1 - 2 / (e^2x + 1)."""
    return ONE - TWO / (exp(x + x) + ONE)


@inline
def cap(x, softcap):
    """softcap * tanh(x / softcap), or x where softcap is 0."""
    if softcap == ZERO:
        return x
    return softcap * tanh(x / softcap)



# ------------------------------------------------------------------------ writing KV


@kernel(
    "void(float32[:, :, :], float32[:, :, :], float32[:, :, :, ::1],"
    " float32[:, :, :, ::1], int64[::1])"
)
def write_kv(key, value, k_cache, v_cache, slots):
    """As spec.write_kv."""
    tokens, kv_heads, dim = key.shape
    if key.size < SMALL:
        for t in range(tokens):
            write_token(key, value, k_cache, v_cache, slots, t)
    else:
        for t in prange(tokens):
            write_token(key, value, k_cache, v_cache, slots, t)


@inline
def write_token(key, value, k_cache, v_cache, slots, t):
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
def head(x, t, h):
    """x[t, h] of an array whose last dimension is contiguous, known to be so."""
    start = (t * x.strides[0] + h * x.strides[1]) // x.itemsize
    return stretch(x, start, x.shape[2])


# ------------------------------------------------------------------ decode attention


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :], float32[:, :, :, ::1],"
    " float32[:, :, :, ::1], int32[:, ::1], int32[::1], float32, int64, float32,"
    " int64)"
)
def _decode_attention(
    out, q, k_cache, v_cache, tables, lengths, scale, window, softcap, threads
):
    """As spec.decode_attention: chunks of context by themselves, then merged."""
    seqs, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    firsts = first_chunks(lengths, window)
    parts = firsts[seqs] * kv_heads
    acc = np.empty((parts, group, dim), np.float32)
    m = np.empty((parts, group), np.float32)
    l = np.empty((parts, group), np.float32)
    counters = np.zeros(1 + seqs * kv_heads, np.int64)
    for _ in prange(threads):
        attend_chunks(
            out, acc, m, l, q, k_cache, v_cache, tables, lengths, firsts, counters,
            scale, window, softcap,
        )


@inline
def first_chunks(lengths, window):
    """firsts[s] = number of context chunks of the sequences before s: [seqs + 1]."""
    firsts = np.zeros(len(lengths) + 1, np.int64)
    for s in range(len(lengths)):
        start = first_position(lengths[s] - 1, window)
        firsts[s + 1] = firsts[s] + (lengths[s] - 1) // CHUNK - start // CHUNK + 1
    return firsts


@inline
def first_position(p, window):
    """The first position that a query at position p reads."""
    return max(0, p - window + 1) if window else 0


@inline
def attend_chunks(
    out, acc, m, l, q, k_cache, v_cache, tables, lengths, firsts, counters,
    scale, window, softcap,
):
    """Take chunk after chunk from counters[0] until none is left.

    Whoever finishes the last chunk of a (sequence, KV head) merges them.
    """
    kv_heads = k_cache.shape[1]
    group, dim = acc.shape[1:]
    queries = np.empty((group, dim), np.float32)
    p = np.empty((group, CHUNK + TOKENS), np.float32)  # a last tile may overshoot
    s = 0
    part = take_ticket(counters, 0)
    while part < len(acc):
        chunk, h = part // kv_heads, part % kv_heads
        while firsts[s + 1] <= chunk:
            s += 1
        first = first_position(lengths[s] - 1, window)
        edge = (first // CHUNK + chunk - firsts[s]) * CHUNK
        start, end = max(first, edge), min(lengths[s], edge + CHUNK)
        scale_queries(queries, q, s, h * group, scale)
        scores(p, queries, k_cache, tables[s], h, start, end)
        for g in range(group):
            m[part, g], l[part, g] = softmax_part(p[g, : end - start], softcap)
        weigh(acc[part], p, v_cache, tables[s], h, start, end)
        finished = take_ticket(counters, 1 + s * kv_heads + h) + 1
        if finished == firsts[s + 1] - firsts[s]:
            merge_chunks(out, acc, m, l, firsts, s, h, kv_heads)
        part = take_ticket(counters, 0)


@inline
def scale_queries(queries, q, t, h, scale):
    """queries[g] = scale * q[t, h + g]."""
    for g in range(len(queries)):
        row = head(q, t, h + g)
        for d in range(len(row)):
            queries[g, d] = scale * row[d]


@inline
def scores(p, queries, k_cache, table, h, start, end):
    """p[g, t - start] = queries[g] . k[t] for the positions t from start to end."""
    _, kv_heads, block_size, dim = k_cache.shape
    t = start
    while t < end:
        offset = t % block_size
        k0 = place(k_cache, table, h, t)
        # A whole tile may reach over unused slots, but not over the end of the block.
        if dim % LANES == 0 and offset + TOKENS <= block_size:
            fetch_ahead(k_cache, table, h, t + block_size, end, TOKENS * dim)
            score_tile(p, queries, k_cache, k0, t - start)
            t += TOKENS
        else:
            for g in range(len(queries)):
                p[g, t - start] = dot(queries, g * dim, k_cache, k0, dim)
            t += 1


@inline
def place(cache, table, h, t):
    """Where position t's row of KV head h starts in the cache's memory."""
    _, kv_heads, block_size, dim = cache.shape
    block, offset = table[t // block_size], t % block_size
    return ((block * kv_heads + h) * block_size + offset) * dim


@inline
def fetch_ahead(cache, table, h, t, end, n):
    """Ask for n numbers from position t on: blocks lie anywhere, so hardware can't."""
    if t < end:
        start = place(cache, table, h, t)
        for d in range(0, n, LINE):
            prefetch(cache, start + d)


@inline
def score_tile(p, queries, keys, k0, column):
    """Scores of every query with TOKENS keys."""
    group, dim = queries.shape
    for g in range(0, group, HEADS):
        dot_tile(
            min(HEADS, group - g), queries, g * dim, dim, keys, k0, dim,
            p, g * p.shape[1] + column, p.shape[1], dim,
        )


@inline
def dot(a, a0, b, b0, n):
    """Sum of a[a0 + d] * b[b0 + d], d < n, in flat memory."""
    a, b = stretch(a, a0, n), stretch(b, b0, n)
    total = ZERO
    for d in range(n):
        total += a[d] * b[d]
    return total


@inline
def softmax_part(p, softcap):
    """p = e^(cap(p) - m) for m = max cap(p); returns (m, sum of p)."""
    if softcap != ZERO:
        for t in range(len(p)):
            p[t] = softcap * tanh(p[t] / softcap)
    m, l = MINUS_INFINITY, ZERO
    for t in range(len(p)):
        m = max(m, p[t])
    for t in range(len(p)):
        p[t] = exp(p[t] - m)
        l += p[t]
    return m, l


@inline
def weigh(acc, p, v_cache, table, h, start, end):
    """acc[g] = sum of p[g, t - start] * v[t] over the positions t from start to end."""
    block_size, dim = v_cache.shape[2:]
    t = start
    while t < end:
        n = min(block_size - t % block_size, end - t)
        fetch_ahead(v_cache, table, h, t + n, end, min(block_size, end - t - n) * dim)
        v0 = place(v_cache, table, h, t)
        product(
            len(acc), dim, n, p, t - start, p.shape[1], v_cache, v0, dim,
            acc, 0, dim, t - start,
        )
        t += n


@inline
def product(rows, columns, depth, a, a0, lda, b, b0, ldb, c, c0, ldc, keep):
    """c (+)= a @ b in flat memory, by tiles; columns beyond the last tile one by one."""
    whole = columns - columns % COLUMNS
    for i in range(0, rows, ROWS):
        n = min(ROWS, rows - i)
        for j in range(0, whole, COLUMNS):
            product_tile(
                n, a, a0 + i * lda, lda, b, b0 + j, ldb,
                c, c0 + i * ldc + j, ldc, depth, keep,
            )
    if whole < columns:
        product_rest(rows, whole, columns, depth, a, a0, lda, b, b0, ldb, c, c0, ldc, keep)


@inline
def product_rest(rows, first, columns, depth, a, a0, lda, b, b0, ldb, c, c0, ldc, keep):
    """product, for the columns from `first` on."""
    for i in range(rows):
        row, sums = stretch(a, a0 + i * lda, depth), stretch(c, c0 + i * ldc, columns)
        for j in range(first, columns):
            column = stretch(b, b0 + j, depth * ldb)
            total = sums[j] if keep else ZERO
            for k in range(depth):
                total += row[k] * column[k * ldb]
            sums[j] = total


@inline
def merge_chunks(out, acc, m, l, firsts, s, h, kv_heads):
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
            weight = exp(m[part, g] - top)  # base e, as m was measured in
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
def _prefill_attention(
    out, q, k_cache, v_cache, tables, query_starts, lengths, scale, window, softcap, threads
):
    """As spec.prefill_attention: tiles of queries, each over its context in pieces."""
    firsts = first_tiles(query_starts, q.shape[1] // k_cache.shape[1])
    counter = np.zeros(1, np.int64)
    for _ in prange(threads):
        attend_tiles(
            out, q, k_cache, v_cache, tables, query_starts, lengths, firsts, counter,
            scale, window, softcap,
        )


@inline
def tile_queries(group):
    """Queries of one task, so that it has about QUERIES rows."""
    return max(1, QUERIES // group)


@inline
def first_tiles(query_starts, group):
    """firsts[s] = number of query tiles of the sequences before s: [seqs + 1]."""
    firsts = np.zeros(len(query_starts), np.int64)
    for s in range(len(query_starts) - 1):
        n = query_starts[s + 1] - query_starts[s]
        firsts[s + 1] = firsts[s] + -(-n // tile_queries(group))
    return firsts


@inline
def attend_tiles(
    out, q, k_cache, v_cache, tables, query_starts, lengths, firsts, counter,
    scale, window, softcap,
):
    """Take query tile after query tile from the counter, the longest contexts first."""
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    group = q.shape[1] // kv_heads
    size = tile_queries(group)
    wide = -(-dim // COLUMNS) * COLUMNS
    scratch = (
        np.empty((size * group, dim), np.float32),  # queries
        np.empty((KEYS // COLUMNS, dim, COLUMNS), np.float32),  # keys, transposed
        np.zeros((KEYS, wide), np.float32),  # values
        np.empty((size * group, KEYS), np.float32),  # p
        np.empty((size * group, wide), np.float32),  # acc
        np.empty(size * group, np.float32),  # m
        np.empty(size * group, np.float32),  # l
    )
    tasks = firsts[-1] * kv_heads
    task = tasks - 1 - take_ticket(counter, 0)
    while task >= 0:
        tile, h = task // kv_heads, task % kv_heads
        s = np.searchsorted(firsts, tile, side="right") - 1
        row = query_starts[s] + (tile - firsts[s]) * size
        n = min(size, query_starts[s + 1] - row)
        p = lengths[s] - query_starts[s + 1] + row
        attend_tile(
            out, q, k_cache, v_cache, tables[s], scratch, row, n, p, h,
            scale, window, softcap,
        )
        task = tasks - 1 - take_ticket(counter, 0)


@inline
def attend_tile(
    out, q, k_cache, v_cache, table, scratch, row, n, position, h,
    scale, window, softcap,
):
    """Queries row .. row + n, the first at `position`, with one KV head."""
    queries, keys, values, p, acc, m, l = scratch
    dim, wide, group = queries.shape[1], acc.shape[1], q.shape[1] // k_cache.shape[1]
    rows = n * group
    for i in range(n):
        scale_queries(queries[i * group : (i + 1) * group], q, row + i, h * group, scale)
    acc[:rows] = ZERO
    m[:rows] = MINUS_INFINITY
    l[:rows] = ZERO
    end = position + n
    for start in range(first_position(position, window), end, KEYS):
        k = min(KEYS, end - start)
        copy_context(keys, values, k_cache, v_cache, table, h, start, k)
        for panel in range(-(-k // COLUMNS)):
            product(
                rows, COLUMNS, dim, queries, 0, dim,
                keys, panel * dim * COLUMNS, COLUMNS, p, panel * COLUMNS, KEYS, 0,
            )
        for r in range(rows):
            at = position + r // group
            low = max(0, first_position(at, window) - start)
            high = min(k, at + 1 - start)
            m[r], l[r] = softmax_step(p[r, :k], low, high, acc[r], m[r], l[r], softcap)
        product(rows, wide, k, p, 0, KEYS, values, 0, wide, acc, 0, wide, 1)
    for r in range(rows):
        for d in range(dim):
            out[row + r // group, h * group + r % group, d] = acc[r, d] / l[r]


@inline
def copy_context(keys, values, k_cache, v_cache, table, h, start, n):
    """keys[t / 16, :, t % 16], values[t] = those of position start + t, for t < n."""
    dim = k_cache.shape[3]
    for t in range(n):
        at = place(k_cache, table, h, start + t)
        k, v = stretch(k_cache, at, dim), stretch(v_cache, at, dim)
        column = stretch(keys, t // COLUMNS * dim * COLUMNS + t % COLUMNS, dim * COLUMNS)
        for d in range(dim):
            column[d * COLUMNS] = k[d]
        for d in range(dim):
            values[t, d] = v[d]


@inline
def softmax_step(p, low, high, acc, m, l, softcap):
    """One row of the online softmax: p becomes weights, 0 outside low .. high.

    Where the maximum grows from m, what acc and l hold shrinks by e^(m - new m).
    """
    if high <= low:
        p[:] = ZERO
        return m, l
    p[:low] = ZERO
    p[high:] = ZERO
    top, total = softmax_part(p[low:high], softcap)
    if top <= m:
        shrink = exp(top - m)
        p[low:high] *= shrink
        return m, l + total * shrink
    shrink = exp(m - top)
    acc *= shrink
    return top, l * shrink + total


# -------------------------------------------------- norms, rotation and activations


@kernel("void(float32[:, :, :], float32[:, :, :], float32[::1], float32)")
def _rms_norm(out, x, weight, eps):
    if x.size < SMALL:
        for t in range(len(x)):
            norm_token(out, x, weight, eps, t)
    else:
        for t in prange(len(x)):
            norm_token(out, x, weight, eps, t)


@inline
def norm_token(out, x, weight, eps, t):
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
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32)"
)
def add_rms_norm(out, residual, x, weight, eps):
    """As spec.add_rms_norm."""
    if x.size < SMALL:
        for t in range(len(x)):
            add_norm_token(out[t], residual[t], x[t], weight, eps)
    else:
        for t in prange(len(x)):
            add_norm_token(out[t], residual[t], x[t], weight, eps)


@inline
def add_norm_token(out, residual, x, weight, eps):
    """residual += x; out = RMSNorm(residual): one row."""
    total = ZERO
    for d in range(len(x)):
        residual[d] += x[d]
        total += residual[d] * residual[d]
    factor = ONE / np.sqrt(total / np.float32(len(x)) + eps)
    for d in range(len(x)):
        out[d] = residual[d] * factor * weight[d]


@kernel("void(float32[:, :, :], float32[:, :, :], int64[::1], float32[:, ::1])")
def rotary(q, k, positions, cos_sin):
    """As spec.rotary."""
    if q.size < SMALL:
        for t in range(len(positions)):
            rotate_token(q, k, cos_sin[positions[t]], t)
    else:
        for t in prange(len(positions)):
            rotate_token(q, k, cos_sin[positions[t]], t)


@inline
def rotate_token(q, k, cos_sin, t):
    """One token's queries and keys."""
    rotate_heads(q, cos_sin, t)
    rotate_heads(k, cos_sin, t)


@inline
def rotate_heads(x, cos_sin, t):
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


@kernel("void(float32[:, ::1], float32[:, ::1])")
def silu_mul(out, gate_up):
    """As spec.silu_mul."""
    if out.size < SMALL:
        for t in range(len(out)):
            silu_row(out[t], gate_up[t])
    else:
        for t in prange(len(out)):
            silu_row(out[t], gate_up[t])


@inline
def silu_row(out, gate_up):
    """out = gate / (1 + e^-gate) * up: one row."""
    n = len(out)
    for d in range(n):
        out[d] = gate_up[d] / (ONE + exp(-gate_up[d])) * gate_up[n + d]


@kernel("void(float32[:, ::1], float32[:, ::1])")
def gelu_tanh_mul(out, gate_up):
    """As spec.gelu_tanh_mul."""
    if out.size < SMALL:
        for t in range(len(out)):
            gelu_row(out[t], gate_up[t])
    else:
        for t in prange(len(out)):
            gelu_row(out[t], gate_up[t])


@inline
def gelu_row(out, gate_up):
    """out = gate / 2 * (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) * up."""
    n = len(out)
    for d in range(n):
        x = gate_up[d]
        inner = np.float32(0.79788456) * (x + np.float32(0.044715) * x * x * x)
        out[d] = HALF * x * (ONE + tanh(inner)) * gate_up[n + d]


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """As spec.rms_norm, for [rows, dim] or [tokens, heads, dim]."""
    y, z = out.numpy(), x.numpy()
    if x.dim() == 2:
        y, z = y[:, None], z[:, None]
    _rms_norm(y, z, weight, eps)


def decode_attention(*args: Tensor | float | int) -> None:
    """As spec.decode_attention."""
    _decode_attention(*args, numba.get_num_threads())


def prefill_attention(*args: Tensor | float | int) -> None:
    """As spec.prefill_attention."""
    _prefill_attention(*args, numba.get_num_threads())


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
