"""One dense linear map, x @ weight.T + bias, in float32, from one copy of its weights.

It packs the weights for oneDNN where torch has it, and keeps them plain otherwise.
It knows nothing of quantisation, layers or checkpoints. Chapter 01 counts its work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# oneDNN asks how many rows the packed weight will meet, and packs differently for one
# row than for many. Packed for 64 rows, a weight serves every row count well: at one
# row 23.6 GB/s over SmolLM2-135M's shapes (packed for one row: 20.1), at 512 rows the
# same 130 to 150 GFLOP/s as packed for 512 (2 cores, AVX2).
PACK_ROWS = 64


def linear_backend() -> str:
    """How this process multiplies dense float32 weights: 'oneDNN' or 'F.linear'."""
    return "oneDNN" if _onednn_works() else "F.linear"


class Linear:
    """x [rows, K] -> x @ weight.T + bias [rows, N], for a weight [N, K].

    It takes the weight over: the caller should drop its own reference, so that only the
    packed copy stays in memory. Equal inputs of one row count give equal outputs.
    """

    __slots__ = ("bias", "in_features", "out_features", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.is_cpu and weight.is_floating_point() and _onednn_works()
        self.weight = _pack(weight) if self.packed else weight.contiguous()

    @classmethod
    def fused(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
    ) -> "Linear":
        """Several maps of one input as one: outputs side by side in the order given.

        A missing bias beside a present one counts as zeros.
        """
        return cls(torch.cat(list(weights)), _fuse_biases(weights, biases or ()))

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K], rows may be strided; a new [rows, N] tensor."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )


def _fuse_biases(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)


def _onednn_works() -> bool:
    """True where the packed product runs here; macOS and some builds lack it."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        packed = _pack(torch.ones(2, 3))
        torch.ops.mkldnn._linear_pointwise(
            torch.ones(1, 3), packed, None, "none", [], ""
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
