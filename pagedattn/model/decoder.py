"""One decoder for every family: embeddings, attention and MLP blocks, the output head.

Knows the computation, and takes weights as ready linears and every hot loop from the
kernel module it is given. Knows nothing of files, requests, or which family it runs:
the differences arrive as data. Chapter 01 counts its work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedattn.model.batch import Batch, LayerCache
from pagedattn.model.families import DecoderConfig
from pagedattn.model.linear import Linear
from pagedattn.model.scratch import Scratch

# What the kernel module's `native` makes of a tensor: the same memory, in the form
# that its kernels take without converting it.
Array = Any


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a model to schedule it and to size its cache.

    `windows` has one entry per layer, 0 where a layer reads the whole context.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    max_model_len: int


class Projection(Protocol):
    """A matrix product with its bias: [T, K] -> [T, N]."""

    out_features: int

    def into(self, out: Array, x: Array) -> None:
        """Write the product of x [T, K] to out [T, N]."""


class Reach(NamedTuple):
    """A batch for one group of layers: where its tokens stand, what they write and
    read. Single tokens go through the decode kernel, longer pieces through prefill."""

    positions: Array  # [T]
    slots: Array  # [T]
    num_decodes: int
    decode: tuple[Array, ...]  # tables and lengths of the first num_decodes requests
    prefill: tuple[Array, ...]  # tables, query starts, lengths of the others


def reach(batch: Batch, group: int, kernels: ModuleType) -> Reach:
    """What the layers of `group` must know of `batch`, as the kernels take it."""
    n, native = batch.num_decodes, kernels.native
    tables, lengths = native(batch.tables[group]), native(batch.lengths)
    return Reach(
        native(batch.positions),
        native(batch.slots[group]),
        n,
        (tables[:n], lengths[:n]),
        (tables[n:], native(batch.query_starts[n:] - n), lengths[n:]),
    )


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights of a layer's norms; None where the family has no norm in that place."""

    before_attention: Array | None
    after_attention: Array | None
    before_mlp: Array | None
    after_mlp: Array | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Paged self-attention: project, normalise, turn, store, read, project.

    `q_norm` and `k_norm` are [head_dim], or [heads x head_dim] where a family
    normalises the whole projection. `cos_sin` None: a layer without positions.
    """

    qkv: Projection
    out: Projection
    q_norm: Array | None
    k_norm: Array | None
    cos_sin: Array | None
    window: int
    config: DecoderConfig
    kernels: ModuleType

    def __call__(
        self, out: Array, x: Array, reach: Reach, cache: LayerCache, scratch: Scratch
    ) -> None:
        """x [T, hidden] -> out [T, hidden]; the batch's keys and values are written."""
        q, k, v = self._project(x, scratch)
        caches = self.kernels.native(cache.k), self.kernels.native(cache.v)
        if self.cos_sin is None:
            self.kernels.write_kv(k, v, *caches, reach.slots)
        else:
            where = reach.positions, self.cos_sin
            self.kernels.rotary_write(q, k, v, *where, *caches, reach.slots)
        read = scratch("read", *q.shape)  # [T, heads, dim]
        self._read(read, q, caches, reach)
        self.out.into(out, read.reshape(len(x), -1))

    def _project(self, x: Array, scratch: Scratch) -> tuple[Array, Array, Array]:
        """q [T, H, D], k and v [T, KVH, D]: views of one product, normed in place."""
        c, rows = self.config, len(x)
        qkv = scratch("qkv", rows, self.qkv.out_features)
        self.qkv.into(qkv, x)
        k0, v0 = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
        self._norm(qkv[:, :k0], self.q_norm)
        self._norm(qkv[:, k0:v0], self.k_norm)
        heads = qkv.reshape(rows, -1, c.head_dim)
        k0, v0 = c.heads, c.heads + c.kv_heads
        return heads[:, :k0], heads[:, k0:v0], heads[:, v0:]

    def _norm(self, x: Array, weight: Array | None) -> None:
        """x [T, width] in place: as a whole, or each head by itself."""
        if weight is not None:
            rows = x.reshape(len(x), -1, len(weight))
            self.kernels.rms_norm(rows, rows, weight, self.config.eps)

    def _read(self, out: Array, q: Array, caches: tuple, reach: Reach) -> None:
        n = reach.num_decodes
        traits = self.config.attention_scale, self.window, self.config.softcap
        if n > 0:
            self.kernels.decode_attention(
                out[:n], q[:n], *caches, *reach.decode, *traits
            )
        if n < len(out):
            self.kernels.prefill_attention(
                out[n:], q[n:], *caches, *reach.prefill, *traits
            )


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate) x up), gate and up in one product; `act` is a kernel.

    Where the product reads panels, and the kernels have one for both, the activation
    is part of it.
    """

    gate_up: Linear
    down: Projection
    activation: str
    kernels: ModuleType

    def __call__(self, out: Array, x: Array, scratch: Scratch) -> None:
        """x [T, hidden] -> out [T, hidden]."""
        width = self.gate_up.out_features
        hidden = scratch("hidden", len(x), width // 2)
        panels = self.gate_up.panels
        fused = getattr(self.kernels, f"{self.activation}_linear", None)
        if panels is None or fused is None:
            gate_up = scratch("gate_up", len(x), width)
            self.gate_up.into(gate_up, x)
            getattr(self.kernels, f"{self.activation}_mul")(hidden, gate_up)
        else:
            fused(hidden, x, panels)
        self.down.into(out, hidden)


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """A mixture of experts: each token visits its `top_k`, weighted by the router.

    Tokens are grouped by expert, so an expert runs once per batch and one that no
    token chose doesn't run. `shared` is visited by every token, behind its own gate.
    """

    router: Linear
    experts: tuple[MLP, ...]
    top_k: int
    normalise: bool
    shared: MLP | None
    shared_gate: Linear | None
    kernels: ModuleType

    def __call__(self, out: Array, x: Array, scratch: Scratch) -> None:
        """x [T, hidden] -> out [T, hidden]."""
        out, x = torch.as_tensor(out), torch.as_tensor(x)
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)  # [T, top_k]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        self._share(out, x, scratch)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            routed = self._visit(self.experts[expert], x[rows], scratch)
            out.index_add_(0, rows, routed * weights[rows, place, None])

    def _share(self, out: Tensor, x: Tensor, scratch: Scratch) -> None:
        """out = what every token gets."""
        if self.shared is None or self.shared_gate is None:
            out.zero_()
        else:
            gate = self.shared_gate(x).sigmoid()
            torch.mul(self._visit(self.shared, x, scratch), gate, out=out)

    def _visit(self, expert: MLP, x: Tensor, scratch: Scratch) -> Tensor:
        out = torch.empty_like(x)
        expert(self.kernels.native(out), self.kernels.native(x), scratch)
        return out


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and an MLP on the residual stream, with their norms."""

    norms: Norms
    attention: Attention
    mlp: MLP | SparseMLP


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model over a paged KV cache.

    `embedding` [vocab, hidden] may keep the file's dtype; rows leave it as `dtype`.
    """

    spec: ModelSpec
    config: DecoderConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Array
    head: Projection
    kernels: ModuleType
    dtype: torch.dtype = torch.float32  # of everything between two kernels
    scratch: Scratch = field(init=False)
    floats: Scratch = field(init=False)  # for logits, where `dtype` is another

    def __post_init__(self) -> None:
        native, device = self.kernels.native, self.embedding.device
        scratch = Scratch(native, device, self.dtype)
        object.__setattr__(self, "floats", Scratch(native, device))
        object.__setattr__(self, "scratch", scratch)

    @torch.no_grad()
    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The batch's last hidden states [T, hidden]; its keys and values are written.

        The residual stream and what the last block adds to it travel apart, so that
        adding and normalising are one kernel. The result stands in memory that the
        next call uses again.
        """
        residual, x, delta = self._stream(batch)
        groups = range(len(batch.tables))
        reaches = [reach(batch, group, self.kernels) for group in groups]
        for layer, cache in zip(self.layers, caches, strict=True):
            norms = layer.norms
            normed = self._add_norm(x, residual, delta, norms.before_attention)
            layer.attention(delta, normed, reaches[cache.group], cache, self.scratch)
            self._norm(delta, norms.after_attention)
            normed = self._add_norm(x, residual, delta, norms.before_mlp)
            layer.mlp(delta, normed, self.scratch)
            self._norm(delta, norms.after_mlp)
        return torch.as_tensor(self._add_norm(x, residual, delta, self.norm))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab_size], scaled and capped.

        They stand in memory that the next call uses again.
        """
        out = self.scratch("logits", len(hidden), self.head.out_features)
        self.head.into(out, self.kernels.native(hidden))
        logits = torch.as_tensor(out)
        if logits.dtype != torch.float32:
            logits = self.floats("logits", *logits.shape).copy_(logits)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _stream(self, batch: Batch) -> tuple[Array, Array, Array]:
        """The residual stream, room for its norm, and a first delta of zeros."""
        ids, scale = batch.ids, self.config.embed_scale
        shape = len(ids), self.embedding.shape[1]
        residual, x, delta = (
            self.scratch(n, *shape) for n in ("residual", "x", "delta")
        )
        torch.as_tensor(residual).copy_(F.embedding(ids, self.embedding)).mul_(scale)
        delta[:] = 0.0
        return residual, x, delta

    def _norm(self, x: Array, weight: Array | None) -> None:
        """x normalised in place, or as it is without a norm."""
        if weight is not None:
            self.kernels.rms_norm(x, x, weight, self.config.eps)

    def _add_norm(
        self, out: Array, residual: Array, delta: Array, weight: Array | None
    ) -> Array:
        """residual += delta, in place; its norm in `out`, or itself without a norm."""
        if weight is None:
            residual += delta
            return residual
        self.kernels.add_rms_norm(out, residual, delta, weight, self.config.eps)
        return out
