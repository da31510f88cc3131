"""Penalties and one draw for each row of logits, in Triton, without a sort.

The functions of spec.py: same names and arguments. It knows tensors on one device, and
nothing of requests or random numbers. Filters keep a beginning of an order, so each is
one number, the rank at which it cuts: a rank is found four bits at a time, by adding up
what lies above 16 candidates in one pass over the row.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, launch, tuned

ENTRIES = 256  # penalised tokens of a row at a time
TOP = tl.constexpr(0x80000000)  # the sign of a float, as bits
LAST = tl.constexpr(2**31 - 1)  # an id behind all others


# -------------------------------------------------------------------------- penalties


@triton.jit(do_not_specialize=["ids", "counts", "starts"])
def penalize_row(
    logits,  # [rows, V]
    ids,  # [entries]
    counts,  # [entries]
    starts,  # [rows + 1]
    penalties,  # repetition, frequency, presence: [rows] each
    vocab,
    ENTRIES: tl.constexpr,
):
    """One row's penalties, ENTRIES tokens at a time."""
    row = tl.program_id(0)
    repetition = tl.load(penalties[0] + row)
    frequency, presence = tl.load(penalties[1] + row), tl.load(penalties[2] + row)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        at = logits + row.to(tl.int64) * vocab + tl.load(ids + i, mask=i < end, other=0)
        count = tl.load(counts + i, mask=i < end, other=0)
        x = tl.load(at, mask=i < end, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        drop = frequency * count + tl.where(count > 0, presence, 0.0)
        tl.store(at, x - drop.to(tl.float32), mask=i < end)


def penalize(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """As spec.penalize."""
    rows, vocab = logits.shape
    penalties, grid = (repetition, frequency, presence), (rows,)
    args = logits, ids, counts, starts, penalties, vocab, ENTRIES
    launch(penalize_row, grid, Config(), *args)


# ------------------------------------------------------------------------------ ranks


@triton.jit
def by_logit(x, i, facts):
    """(rank, amount): logits in their order as whole numbers, each counting 1."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # -0.0 + 0.0 is 0.0, its equal
    rank = tl.where(bits >= TOP, ~bits, bits | TOP)
    return rank, tl.full(x.shape, 1.0, tl.float64)


@triton.jit
def by_weight(x, i, facts):
    """(rank, amount): weights that min-p and top-k keep; a rank is a float's bits."""
    peak, temperature, min_p, cut = facts
    w = tl.exp((x - peak) / temperature)
    rank, amount = by_logit(x, i, facts)
    w = tl.where(is_kept(rank, i, cut) & (w >= min_p), w, 0.0)
    return w.to(tl.uint32, bitcast=True), w.to(tl.float64)


@triton.jit
def is_kept(rank, i, cut):
    """Whether a token stands before the cut: larger rank first, then lower id."""
    lowest, last = cut
    return (rank > lowest) | ((rank == lowest) & (i <= last))


@triton.jit
def block_of(row, first, vocab, facts, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """(ids, ranks, amounts) of BLOCK logits; no amount behind the row's end."""
    i = first + tl.arange(0, BLOCK)
    x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
    rank, amount = RANK(x, i, facts)
    return i, rank, tl.where(i < vocab, amount, 0.0)


@triton.jit
def total_of(row, vocab, facts, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """The amount of all tokens."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        i, rank, amount = block_of(row, first, vocab, facts, RANK, BLOCK)
        total += amount
    return tl.sum(total, 0)


@triton.jit
def lowest_rank(row, vocab, goal, facts, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """The largest rank such that the tokens of this rank and above amount to `goal`."""
    lowest = tl.zeros((), tl.uint32)
    for digit in range(8):
        step = tl.full((), 28, tl.uint32) - 4 * digit
        candidates = lowest + (tl.arange(0, 16).to(tl.uint32) << step)
        amounts = tl.zeros((16,), tl.float64)
        for first in range(0, vocab, BLOCK):
            i, rank, amount = block_of(row, first, vocab, facts, RANK, BLOCK)
            above = rank[:, None] >= candidates[None, :]
            amounts += tl.sum(tl.where(above, amount[:, None], 0.0), 0)
        reached = tl.sum((amounts >= goal).to(tl.int32), 0) - 1
        lowest += tl.maximum(reached, 0).to(tl.uint32) << step
    return lowest


@triton.jit
def cut_at(row, vocab, goal, facts, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """(lowest rank, last id of that rank) of the first tokens that reach `goal`.

    The token that reaches it is in.
    """
    lowest = lowest_rank(row, vocab, goal, facts, RANK, BLOCK)
    above = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        i, rank, amount = block_of(row, first, vocab, facts, RANK, BLOCK)
        above += tl.where(rank > lowest, amount, 0.0)
    missing = goal - tl.sum(above, 0)
    before, last = tl.zeros((), tl.float64), tl.full((), LAST, tl.int32)
    for first in range(0, vocab, BLOCK):
        i, rank, amount = block_of(row, first, vocab, facts, RANK, BLOCK)
        amount = tl.where(rank == lowest, amount, 0.0)
        sums = before + tl.cumsum(amount, 0)
        reached = (amount > 0) & (sums >= missing)
        last = tl.minimum(last, tl.min(tl.where(reached, i, LAST), 0))
        before += tl.sum(amount, 0)
    return lowest, last


# --------------------------------------------------------------------------- one draw


@triton.jit
def largest(row, vocab, BLOCK: tl.constexpr):
    """(value, id) of the first largest logit; a NaN is infinite."""
    peak, best = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        top = tl.max(x, 0)
        here = tl.min(tl.where((x == top) & (i < vocab), i, LAST), 0)
        best = tl.where(top > peak, here, best)
        peak = tl.maximum(peak, top)
    return peak, best


@triton.jit
def drawn(row, vocab, u, nucleus, facts, BLOCK: tl.constexpr):
    """The first id whose running sum of weights exceeds u of their total.

    Else, where rounding lets no sum exceed it, the last id with weight.
    """
    before, goal = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for first in range(0, vocab, BLOCK):
        i, rank, amount = block_of(row, first, vocab, facts, by_weight, BLOCK)
        goal += tl.sum(tl.where(is_kept(rank, i, nucleus), amount, 0.0), 0)
    goal = goal * u
    found, last = tl.full((), LAST, tl.int32), tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        i, rank, amount = block_of(row, first, vocab, facts, by_weight, BLOCK)
        amount = tl.where(is_kept(rank, i, nucleus), amount, 0.0)
        sums = before + tl.cumsum(amount, 0)
        passing = (amount > 0) & (sums > goal)
        found = tl.minimum(found, tl.min(tl.where(passing, i, LAST), 0))
        last = tl.maximum(last, tl.max(tl.where(amount > 0, i, 0), 0))
        before += tl.sum(amount, 0)
    return tl.minimum(found, last)


@triton.jit(do_not_specialize=["uniform"])
def sample_row(
    out,  # [rows]
    logits,  # [rows, V]
    filters,  # temperature, top_k, top_p, min_p: [rows] each
    uniform,  # [rows]
    vocab,
    BLOCK: tl.constexpr,
):
    """One row's token, -1 where its largest logit is not finite. A filter that a row
    does not ask for costs it nothing."""
    r = tl.program_id(0)
    temperature, top_k = tl.load(filters[0] + r), tl.load(filters[1] + r)
    top_p, min_p = tl.load(filters[2] + r), tl.load(filters[3] + r)
    row = logits + r.to(tl.int64) * vocab
    peak, token = largest(row, vocab, BLOCK)
    if tl.abs(peak) == float("inf"):
        token = tl.full((), -1, tl.int32)
    elif temperature > 0:
        lowest, last = tl.zeros((), tl.uint32), tl.full((), LAST, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            goal = top_k.to(tl.float64)
            lowest, last = cut_at(row, vocab, goal, (peak,), by_logit, BLOCK)
        facts = peak, temperature, min_p, (lowest, last)
        lowest, last = tl.zeros((), tl.uint32), tl.full((), LAST, tl.int32)
        if top_p < 1:
            goal = top_p * total_of(row, vocab, facts, by_weight, BLOCK)
            lowest, last = cut_at(row, vocab, goal, facts, by_weight, BLOCK)
        u = tl.load(uniform + r)
        token = drawn(row, vocab, u, (lowest, last), facts, BLOCK)
    tl.store(out + r, token)


def kind_of(out: Tensor, logits: Tensor, *_: Any) -> tuple[Any, ...]:
    """For what a choice of configuration holds."""
    return (logits.shape[1],)


@tuned(Config(dict(BLOCK=1024), 8), Config(dict(BLOCK=2048), 16), key=kind_of)
def sample(
    config: Config,
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> None:
    """As spec.sample."""
    (rows, vocab), block = logits.shape, config.sizes["BLOCK"]
    filters = temperature, top_k, top_p, min_p
    launch(sample_row, (rows,), config, out, logits, filters, uniform, vocab, block)
