"""The product of a mixture of experts in Triton: each token's row meets its expert.

It knows tensors on one device, and nothing of routers. Rows are sorted by expert, so
that a tile of rows reads one expert's weights, once.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, launch, tuned
from .ragged import rows_of, tiles


@triton.jit(do_not_specialize=["sources", "starts"])
def multiply_tile(
    out,  # [rows, N]
    x,  # [tokens, K]
    weights,  # [experts, N, K]
    sources,  # [rows]
    starts,  # [experts + 1]
    strides,  # of x by token
    sizes,  # experts, N, K
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (columns, tile): some of one expert's rows, some of its outputs."""
    experts, n, depth = sizes
    e, row, end = rows_of(tl.program_id(1), starts, experts, ROWS)
    if row >= end:
        return
    r = row.to(tl.int64) + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(sources + r, mask=r < end, other=0)
    above = x + token[:, None] * strides[0]
    beside = weights + (e.to(tl.int64) * n + c)[None, :] * depth
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = (r < end)[:, None] & (k < depth)[None, :]
        a = tl.load(above + k[None, :], mask=inside, other=0.0)
        inside = (k < depth)[:, None] & (c < n)[None, :]
        b = tl.load(beside + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    inside = (r < end)[:, None] & (c < n)[None, :]
    tl.store(out + r[:, None] * n + c[None, :], acc, mask=inside)


def kind_of(out: Tensor, x: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
    """For what a choice holds: the weights, and rows of an expert to a power of two."""
    rows = len(out) // len(weights)
    return x.dtype, *weights.shape, rows.bit_length()


@tuned(
    Config(dict(ROWS=16, COLUMNS=128, DEPTH=64), 4, 3),
    Config(dict(ROWS=64, COLUMNS=128, DEPTH=64), 4, 3),
    Config(dict(ROWS=128, COLUMNS=128, DEPTH=64), 8, 3),
    key=kind_of,
)
def grouped_linear(
    config: Config,
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    sources: Tensor,
    starts: Tensor,
) -> None:
    """As spec.grouped_linear."""
    (rows, n), experts = out.shape, len(weights)
    height, columns, depth = config.sizes.values()
    launch(
        multiply_tile,
        (triton.cdiv(n, columns), tiles(rows, experts, height)),
        config,
        out,
        x,
        weights,
        sources,
        starts,
        (x.stride(0),),
        (experts, n, x.shape[1]),
        height,
        columns,
        depth,
    )
