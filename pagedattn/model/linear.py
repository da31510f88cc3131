"""One dense linear map, x @ weight.T + bias, in float32, from one copy of its weights.

It lays the weights out for whoever multiplies fastest here: our kernel, oneDNN, or
torch as it is. It knows nothing of quantisation, layers or checkpoints. Chapter 01
counts its work.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagedattn.kernels import cpu

Array = Any  # a tensor, or the numpy array that shares its memory
Product = Callable[[Array, Array], None]

# oneDNN asks how many rows the packed weight will meet. Packed for 64 rows, a weight
# serves every row count well, one row included.
PACK_ROWS = 64


@functools.cache
def linear_backend() -> str:
    """How this process multiplies dense float32 weights.

    "panels", our kernel, where its tiles were measured: oneDNN took 1.06 to 1.95 times
    as long with AVX2, 0.99 to 1.8 with AVX-512 (book/measured/LOG.md). Elsewhere
    "oneDNN", where torch has it, or else "F.linear", torch's plain product.
    """
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        return "panels"
    return "oneDNN" if _onednn_works() else "F.linear"


class Linear:
    """x [rows, K] -> x @ weight.T + bias [rows, N], for a weight [N, K].

    It takes the weight over: the caller should drop its own reference, so that only the
    packed copy stays in memory. Equal inputs of one row count give equal outputs.
    """

    __slots__ = ("backend", "bias", "in_features", "out_features", "product", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        ours = weight.is_cpu and weight.dtype == torch.float32
        self.backend = linear_backend() if ours else "F.linear"
        pack, product = _BACKENDS[self.backend]
        self.weight = pack(weight.contiguous())
        self.product: Product = product(self.weight, bias)

    @classmethod
    def fused(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
    ) -> "Linear":
        """Several maps of one input as one: outputs side by side in the order given.

        A missing bias beside a present one counts as zeros.
        """
        return cls(torch.cat(list(weights)), _fuse_biases(weights, biases or ()))

    @property
    def panels(self) -> Tensor | None:
        """The weight, if a kernel may take it for a pair of maps that meet: as whole
        panels, and without a bias."""
        whole = self.out_features % (2 * cpu.COLUMNS) == 0 and self.bias is None
        return self.weight if whole and self.backend == "panels" else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K], rows may be strided; a new [rows, N] tensor."""
        out = x.new_empty(len(x), self.out_features)
        self.into(out, x)
        return out

    def into(self, out: Array, x: Array) -> None:
        """The same, written to `out`; both are tensors, or what kernels take."""
        self.product(out, x)


def _fuse_biases(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])


# From how many rows on a product is nearly as fast as it gets.
ROWS = (32, 64, 128, 256, 512)
NEARLY = 0.9


def measured_knee() -> int:
    """Rows that a step should have on this machine; takes about 50 ms."""
    linear = Linear(torch.ones(1024, 1024))
    inputs = [torch.ones(rows, 1024) for rows in ROWS]
    seconds = [math.inf] * len(ROWS)
    for _ in range(3):
        for i, x in enumerate(inputs):
            start = time.perf_counter()
            linear(x)
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return knee([rows / s for rows, s in zip(ROWS, seconds, strict=True)])


def knee(rates: Sequence[float]) -> int:
    """The fewest of ROWS that reach NEARLY the best of the rates, one for each."""
    best = max(rates)
    return next(r for r, rate in zip(ROWS, rates, strict=True) if rate >= NEARLY * best)


# Three layouts of a weight, and the product for each.
def _by_panels(weight: Tensor, bias: Tensor | None) -> Product:
    panels = cpu.native(weight)

    def product(out: Array, x: Array) -> None:
        cpu.linear(out, x, panels)
        if bias is not None:
            torch.as_tensor(out).add_(bias)

    return product


def _pack_for_onednn(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)


def _by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    def product(out: Array, x: Array) -> None:
        x = torch.as_tensor(x)
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        torch.as_tensor(out).copy_(y)

    return product


def _by_torch(weight: Tensor, bias: Tensor | None) -> Product:
    if weight.is_cuda:
        return _by_cublas(weight.T, bias)

    def product(out: Array, x: Array) -> None:
        y = functional.linear(torch.as_tensor(x), weight, bias)
        torch.as_tensor(out).copy_(y)

    return product


def _by_cublas(columns: Tensor, bias: Tensor | None) -> Product:
    """Straight into `out`: a copy would be one more kernel for each product."""

    def product(out: Array, x: Array) -> None:
        if bias is None:
            torch.mm(x, columns, out=out)
        else:
            torch.addmm(bias, x, columns, out=out)

    return product


_BACKENDS = {
    "panels": (cpu.pack, _by_panels),
    "oneDNN": (_pack_for_onednn, _by_onednn),
    "F.linear": (lambda weight: weight, _by_torch),
}


def _onednn_works() -> bool:
    """True where the packed product runs here; macOS and some builds lack it."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        packed = _pack_for_onednn(torch.ones(2, 3))
        torch.ops.mkldnn._linear_pointwise(
            torch.ones(1, 3), packed, None, "none", [], ""
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
