"""Norms and gated activations in Triton: one pass over memory each, sums in float32.

The functions of spec.py: same names and arguments. It knows tensors on one device, and
nothing of models or requests.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, launch, tuned

TILE = 2048  # numbers that a program of a narrow norm takes: several rows


def warps_for(n: int) -> int:
    """Warps for a row of n numbers, so that a thread holds 8 to 16 of them."""
    return min(16, max(4, n // 512))


@triton.jit
def normed(x, inside, weight, eps, DIM: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) * weight for rows x [rows, wide], 0 outside of them."""
    d = tl.arange(0, x.shape[1])
    w = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
    return x * factor[:, None] * w[None, :]


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    out,  # [tokens, heads, dim]
    x,  # [tokens, heads, dim]
    weight,  # [dim]
    strides,  # of out by token and by head, of x likewise
    rows,  # tokens * heads
    heads,
    eps,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """ROWS rows of rms_norm, a row being one head of one token."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    inside = (r < rows)[:, None] & (d < DIM)[None, :]
    t, h = (r // heads).to(tl.int64), r % heads
    target = out + (t * strides[0] + h * strides[1])[:, None] + d[None, :]
    source = x + (t * strides[2] + h * strides[3])[:, None] + d[None, :]
    row = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, normed(row, inside, weight, eps, DIM), mask=inside)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """As spec.rms_norm, for [rows, dim] or [tokens, heads, dim]."""
    if x.dim() == 2:
        out, x = out[:, None], x[:, None]
    tokens, heads, dim = x.shape
    wide = triton.next_power_of_2(dim)
    rows = max(1, TILE // wide)
    launch(
        norm_rows,
        (triton.cdiv(tokens * heads, rows),),
        Config(warps=warps_for(rows * wide)),
        out,
        x,
        weight,
        (*out.stride()[:2], *x.stride()[:2]),
        tokens * heads,
        heads,
        eps,
        dim,
        rows,
        wide,
    )


@triton.jit
def add_norm_row(
    out,  # [rows, dim]
    residual,  # [rows, dim]
    x,  # [rows, dim]
    weight,  # [dim]
    eps,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One row: residual += x; out = RMSNorm of the residual as it was stored."""
    start = tl.program_id(0).to(tl.int64) * DIM
    d = tl.arange(0, WIDE)[None, :]
    inside = d < DIM
    old = tl.load(residual + start + d, mask=inside, other=0.0)
    new = tl.load(x + start + d, mask=inside, other=0.0).to(tl.float32)
    total = (old.to(tl.float32) + new).to(old.dtype)
    tl.store(residual + start + d, total, mask=inside)
    row = normed(total.to(tl.float32), inside, weight, eps, DIM)
    tl.store(out + start + d, row, mask=inside)


def add_rms_norm(
    out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float
) -> None:
    """As spec.add_rms_norm."""
    rows, dim = x.shape
    wide = triton.next_power_of_2(dim)
    config = Config(warps=warps_for(wide))
    launch(add_norm_row, (rows,), config, out, residual, x, weight, eps, dim, wide)


# ------------------------------------------------------------------------ activations


@triton.jit
def silu(x):
    """x / (1 + e^-x)."""
    return x / (1 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """x / 2 (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-2 * y))


@triton.jit
def gate_row(
    out,  # [rows, width]
    gate_up,  # [rows, 2 width]
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (column block, row): out = ACTIVATION(gate) up."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = gate_up + row * 2 * width + d
    x = tl.load(gate, mask=d < width, other=0.0).to(tl.float32)
    up = tl.load(gate + width, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, ACTIVATION(x) * up, mask=d < width)


def gated(config: Config, activation: Any, out: Tensor, gate_up: Tensor) -> None:
    """out = activation(gate) up."""
    (rows, width), block = out.shape, config.sizes["BLOCK"]
    grid = triton.cdiv(width, block), rows
    launch(gate_row, grid, config, out, gate_up, width, activation, block)


BLOCKS = tuple(Config(dict(BLOCK=n), warps) for n, warps in ((1024, 4), (2048, 8)))


def kind_of(out: Tensor, gate_up: Tensor) -> tuple[Any, ...]:
    """For what a choice of configuration holds."""
    return out.dtype, out.shape[1]


@tuned(*BLOCKS, key=kind_of)
def silu_mul(config: Config, out: Tensor, gate_up: Tensor) -> None:
    """As spec.silu_mul."""
    gated(config, silu, out, gate_up)


@tuned(*BLOCKS, key=kind_of)
def gelu_tanh_mul(config: Config, out: Tensor, gate_up: Tensor) -> None:
    """As spec.gelu_tanh_mul."""
    gated(config, gelu_tanh, out, gate_up)
