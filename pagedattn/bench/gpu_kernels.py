"""The kernels' problems for `bench gpu`: inputs, least work, and torch's equivalents.

A problem is made on any device and in any size, so that a small one runs under
Triton's interpreter. Answers are those of the specification in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagedattn.bench.gpu_report import Check, Timing
from pagedattn.kernels import spec

Clock = Callable[[Callable[[], Any]], float]  # seconds of one call
# Of the largest expected number: a 16-bit float has 8 or 11 bits, sums add to that.
ALLOWED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's sizes, and those of the problems."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    width: int
    vocab: int
    seqs: int
    context: int
    prompt: int
    block: int = 16


QWEN3_8B = dict(heads=32, kv_heads=8, dim=128, hidden=4096, width=12288, vocab=151_936)
TO_CHECK = Sizes(**QWEN3_8B, seqs=5, context=777, prompt=515)
TO_TIME = Sizes(**QWEN3_8B, seqs=64, context=4096, prompt=8192)


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of one kernel; `outs` are the places of those that it writes."""

    name: str
    label: str
    args: tuple[Any, ...]
    outs: tuple[int, ...]
    bytes: float
    flops: float = 0.0
    exact: bool = False  # whole numbers: equal, and computed in the same floats
    peer: str = ""
    other: Callable[[], Any] | None = None


def problems(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Problem]:
    """One of each kernel, one after the other, so that one's memory is the next's."""
    make = Maker(sizes, device, dtype)
    for build in (decode, prefill, cascade, cached, norms, gates, experts, sampling):
        yield from build(make)


class Maker:
    """Seeded tensors of one dtype on one device."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self._draw = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        like = dict(device=self.device, dtype=dtype or self.dtype)
        return torch.randn(shape, generator=self._draw, **like)

    def blank(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """NaN, or -1: what is not written shows."""
        dtype = dtype or self.dtype
        fill = torch.nan if dtype.is_floating_point else -1
        return torch.full(shape, fill, device=self.device, dtype=dtype)

    def whole(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """These whole numbers."""
        return torch.as_tensor(values).to(self.device, dtype)

    def cache(self, seqs: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k_cache, v_cache, tables): contexts in shuffled blocks; block 0 is null."""
        s = self.sizes
        per = -(-context // s.block)
        order = torch.randperm(seqs * per, generator=self._draw, device=self.device)
        shape = seqs * per + 1, s.kv_heads, s.block, s.dim
        tables = (1 + order).int().view(seqs, per)
        return self.random(*shape), self.random(*shape), tables


def decode(make: Maker) -> Iterator[Problem]:
    """Paged decode attention: a step of `seqs` sequences."""
    s, n = make.sizes, make.sizes.seqs
    k, v, tables = make.cache(n, s.context)
    q, out = make.random(n, s.heads, s.dim), make.blank(n, s.heads, s.dim)
    lengths = make.whole([s.context] * n, torch.int32)
    shape = n, s.kv_heads, s.context, s.dim
    keys, values = make.random(*shape), make.random(*shape)
    yield Problem(
        "decode_attention",
        f"{n} x {s.context}",
        (out, q, k, v, tables, lengths, s.dim**-0.5, 0, 0.0),
        (0,),
        2 * keys.nbytes + 2 * q.nbytes,
        4 * n * s.heads * s.context * s.dim,
        peer="SDPA",
        other=lambda: functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, enable_gqa=True
        ),
    )


def prefill(make: Maker) -> Iterator[Problem]:
    """Paged prefill attention: one prompt from its beginning."""
    s, n = make.sizes, make.sizes.prompt
    k, v, tables = make.cache(1, n)
    q, out = make.random(n, s.heads, s.dim), make.blank(n, s.heads, s.dim)
    ends = make.whole([0, n], torch.int32)
    keys, values = (make.random(1, s.kv_heads, n, s.dim) for _ in range(2))
    yield Problem(
        "prefill_attention",
        f"1 x {n}",
        (out, q, k, v, tables, ends, ends[1:], s.dim**-0.5, 0, 0.0),
        (0,),
        2 * keys.nbytes + 2 * q.nbytes,
        4 * s.heads * s.dim * n * (n + 1) / 2,
        peer="SDPA",
        other=lambda: functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
        ),
    )


def cascade(make: Maker) -> Iterator[Problem]:
    """Attention where all contexts begin with the same blocks."""
    s, n = make.sizes, make.sizes.seqs
    k, v, tables = make.cache(n, s.context)
    shared = s.context // 2 // s.block * s.block
    tables[:, : shared // s.block] = tables[:1, : shared // s.block].clone()
    q, out = make.random(n, s.heads, s.dim), make.blank(n, s.heads, s.dim)
    starts = make.whole(range(n + 1), torch.int32)
    lengths = make.whole([s.context] * n, torch.int32)
    tokens = shared + n * (s.context - shared)
    yield Problem(
        "cascade_attention",
        f"{n} x {s.context}, {shared} shared",
        (out, q, k, v, tables, starts, lengths, shared, s.dim**-0.5, 0.0),
        (0,),
        2 * tokens * s.kv_heads * s.dim * q.itemsize + 2 * q.nbytes,
        4 * n * s.heads * s.context * s.dim,
    )


def cached(make: Maker) -> Iterator[Problem]:
    """What turns heads, fills the cache and copies blocks."""
    s, n = make.sizes, make.sizes.prompt
    k_cache, v_cache, tables = make.cache(1, n)
    slots = (tables[0].long()[:, None] * s.block).add(
        torch.arange(s.block, device=make.device)
    )
    slots = slots.flatten()[:n]
    fused = make.random(n, s.heads + 2 * s.kv_heads, s.dim)
    q, k, v = fused.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
    angles = make.random(n, s.dim // 2, dtype=torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = make.whole(range(n))
    kv, q_bytes = k.numel() * k.itemsize, q.numel() * q.itemsize
    yield Problem(
        "write_kv", f"{n} tokens", (k, v, k_cache, v_cache, slots), (2, 3), 4 * kv
    )
    yield Problem(
        "rotary_write",
        f"{n} tokens",
        (q, k, v, positions, cos_sin, k_cache, v_cache, slots),
        (0, 1, 5, 6),
        2 * q_bytes + 5 * kv + cos_sin.nbytes,
    )
    half = (len(k_cache) - 1) // 2
    sources, targets = make.whole(range(half)), make.whole(range(half, 2 * half))
    yield Problem(
        "copy_blocks",
        f"{half} blocks",
        (k_cache, v_cache, sources, targets),
        (0, 1),
        4 * half * k_cache[0].nbytes,
    )


def norms(make: Maker) -> Iterator[Problem]:
    """RMSNorm, and with the residual."""
    n, hidden = make.sizes.prompt, make.sizes.hidden
    x, residual, weight = make.random(n, hidden), make.random(n, hidden), None
    weight, out = make.random(hidden, dtype=torch.float32), make.blank(n, hidden)
    yield Problem("rms_norm", f"{n} rows", (out, x, weight, 1e-6), (0,), 2 * x.nbytes)
    yield Problem(
        "add_rms_norm",
        f"{n} rows",
        (out, residual, x, weight, 1e-6),
        (0, 1),
        4 * x.nbytes,
    )


def gates(make: Maker) -> Iterator[Problem]:
    """The MLP's activations."""
    n, width = make.sizes.prompt, make.sizes.width
    gate_up, out = make.random(n, 2 * width), make.blank(n, width)
    for name in ("silu_mul", "gelu_tanh_mul"):
        yield Problem(name, f"{n} rows", (out, gate_up), (0,), 3 * out.nbytes)


def experts(make: Maker) -> Iterator[Problem]:
    """A mixture's product: 8 experts, each token visits two; cuBLAS has one for all."""
    s, n = make.sizes, make.sizes.prompt
    width = s.width // 8
    x, weights = make.random(n, s.hidden), make.random(8, width, s.hidden)
    weights *= s.hidden**-0.5
    out, rows = make.blank(2 * n, width), 2 * n
    sources = make.whole([i % n for i in range(rows)])
    starts = make.whole([rows * e // 8 for e in range(9)])
    dense, twice = weights[0].T, torch.cat((x, x))
    yield Problem(
        "grouped_linear",
        f"{rows} rows, 8 experts",
        (out, x, weights, sources, starts),
        (0,),
        x.nbytes + weights.nbytes + out.nbytes,
        2 * rows * width * s.hidden,
        peer="cuBLAS, one expert",
        other=lambda: twice @ dense,
    )


def sampling(make: Maker) -> Iterator[Problem]:
    """One token a row: greedy, and with every filter; and penalties."""
    n, vocab = make.sizes.seqs, make.sizes.vocab
    logits = 3 * make.random(n, vocab, dtype=torch.float32)
    out, ones = make.blank(n, dtype=torch.int64), make.whole([1] * n, torch.float32)
    u = torch.rand(n, generator=make._draw, device=make.device, dtype=torch.float64)
    for label, t, k, p in (("greedy", 0.0, 0, 1.0), ("top-k and top-p", 0.8, 40, 0.9)):
        asked = (ones * t, (ones * k).int(), (ones * p).double(), ones * 0)
        yield Problem(
            "sample",
            f"{n} rows, {label}",
            (out, logits, *asked, u),
            (0,),
            logits.nbytes,
            exact=True,
        )
    seen = min(200, vocab)
    ids, counts = make.whole(list(range(seen)) * n), make.whole([1] * seen * n)
    starts = make.whole([i * seen for i in range(n + 1)])
    half = ones.double() / 2
    yield Problem(
        "penalize",
        f"{n} rows",
        (logits, ids, counts, starts, ones * 1.5, half, half),
        (0,),
        n * seen * 24,
    )


def check(kernels: ModuleType | Any, problem: Problem) -> Check:
    """The kernel's answer against the specification's, in float64."""
    ours, theirs = (
        copied(problem.args, None),
        copied(problem.args, None if problem.exact else torch.float64),
    )
    getattr(kernels, problem.name)(*ours)
    getattr(spec, problem.name)(*theirs)
    worst = 0.0
    for place in problem.outs:
        expected = theirs[place].double().nan_to_num()
        off = (ours[place].double().nan_to_num(1e30) - expected).abs().max().item()
        worst = max(worst, off / max(expected.abs().max().item(), 1e-30))
    dtype = problem.args[problem.outs[0]].dtype
    allowed = 0.0 if problem.exact else ALLOWED[dtype]
    return Check(f"{problem.name} ({problem.label})", worst, allowed)


def copied(args: tuple[Any, ...], floats: torch.dtype | None) -> list[Any]:
    """Arguments of their own memory, floating ones in another dtype if given."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (
            x.to(floats, copy=True) if floats and x.is_floating_point() else x.clone()
        )

    return [one(x) for x in args]


def timed(kernels: ModuleType | Any, problem: Problem, clock: Clock) -> Timing:
    """The kernel's seconds, and its peer's."""
    function, other = getattr(kernels, problem.name), problem.other
    function(*problem.args)  # compiles, and chooses its configuration
    return Timing(
        problem.name,
        problem.label,
        clock(lambda: function(*problem.args)),
        problem.bytes,
        problem.flops,
        problem.peer,
        None if other is None else clock(other),
    )
