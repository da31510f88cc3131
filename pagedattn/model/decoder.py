"""One decoder for every family: embeddings, attention and MLP blocks, the output head.

Knows the computation, and takes weights as ready linears and every hot loop from the
kernel module it is given. Knows nothing of files, requests, or which family it runs:
the differences arrive as data. Chapter 01 counts its work.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedattn.model.batch import Batch, LayerCache
from pagedattn.model.families import DecoderConfig
from pagedattn.model.linear import Linear


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

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights of a layer's norms; None where the family has no norm in that place."""

    before_attention: Tensor | None
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Paged self-attention: project, normalise, turn, store, read, project.

    `q_norm` and `k_norm` are [head_dim], or [heads x head_dim] where a family
    normalises the whole projection. `cos_sin` None: a layer without positions.
    """

    qkv: Projection
    out: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos_sin: Tensor | None
    window: int
    config: DecoderConfig
    kernels: ModuleType

    def __call__(self, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes this batch's keys and values first."""
        q, k, v = self._project(x)
        to = cache.k, cache.v, batch.slots[cache.group]
        if self.cos_sin is None:
            self.kernels.write_kv(k, v, *to)
        else:
            self.kernels.rotary_write(q, k, v, batch.positions, self.cos_sin, *to)
        out = q.new_empty(q.shape)  # [T, heads, dim]
        self._read(out, q, batch, cache)
        return self.out(out.view(len(x), -1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, KVH, D]: views of one product, or normed copies."""
        c = self.config
        heads = self.qkv(x).view(len(x), -1, c.head_dim)
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        return self._normed(q, self.q_norm), self._normed(k, self.k_norm), v

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        rows = x.reshape(-1, len(weight))
        self.kernels.rms_norm(rows, rows, weight, self.config.eps)
        return rows.view(x.shape)

    def _read(self, out: Tensor, q: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Single tokens go through the decode kernel, longer pieces through prefill."""
        n, tables, lengths = batch.num_decodes, batch.tables[cache.group], batch.lengths
        kv = cache.k, cache.v
        traits = self.config.attention_scale, self.window, self.config.softcap
        if n > 0:
            self.kernels.decode_attention(
                out[:n], q[:n], *kv, tables[:n], lengths[:n], *traits
            )
        if n < len(lengths):
            starts = batch.query_starts[n:] - n
            self.kernels.prefill_attention(
                out[n:], q[n:], *kv, tables[n:], starts, lengths[n:], *traits
            )


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate) x up), gate and up in one product; `act` is a kernel.

    Where the product reads panels, the activation is part of it.
    """

    gate_up: Linear
    down: Projection
    activation: str
    kernels: ModuleType

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out = x.new_empty(len(x), self.gate_up.out_features // 2)
        panels = self.gate_up.panels
        if panels is None:
            getattr(self.kernels, f"{self.activation}_mul")(out, self.gate_up(x))
        else:
            getattr(self.kernels, f"{self.activation}_linear")(out, x, panels)
        return self.down(out)


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """A mixture of experts: each token visits its `top_k`, weighted by the router.

    Tokens are grouped by expert, so an expert runs once per batch and one that no
    token chose doesn't run. `shared` is visited by every token, behind its own gate.
    """

    router: Projection
    experts: tuple[MLP, ...]
    top_k: int
    normalise: bool
    shared: MLP | None
    shared_gate: Projection | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)  # [T, top_k]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self._shared(x)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            routed = self.experts[expert](x[rows]) * weights[rows, place, None]
            out.index_add_(0, rows, routed)
        return out

    def _shared(self, x: Tensor) -> Tensor:
        if self.shared is None or self.shared_gate is None:
            return torch.zeros_like(x)
        return self.shared(x) * self.shared_gate(x).sigmoid()


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and an MLP on the residual stream, with their norms."""

    norms: Norms
    attention: Attention
    mlp: MLP | SparseMLP


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model over a paged KV cache.

    `embedding` [vocab, hidden] may keep the file's dtype; rows leave it as float32.
    """

    spec: ModelSpec
    config: DecoderConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Projection
    kernels: ModuleType

    @torch.no_grad()
    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The batch's last hidden states [T, hidden]; its keys and values are written.

        The residual stream and what the last block adds to it travel apart, so that
        adding and normalising are one kernel.
        """
        residual = F.embedding(batch.ids, self.embedding).float()
        residual = residual * self.config.embed_scale
        delta = torch.zeros_like(residual)
        for layer, cache in zip(self.layers, caches, strict=True):
            norms = layer.norms
            x = self._add_norm(residual, delta, norms.before_attention)
            delta = self._norm(layer.attention(x, batch, cache), norms.after_attention)
            x = self._add_norm(residual, delta, norms.before_mlp)
            delta = self._norm(layer.mlp(x), norms.after_mlp)
        return self._add_norm(residual, delta, self.norm)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab_size], scaled and capped."""
        logits = self.head(hidden)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x normalised in place, or as it is without a norm."""
        if weight is None:
            return x
        self.kernels.rms_norm(x, x, weight, self.config.eps)
        return x

    def _add_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor | None
    ) -> Tensor:
        """residual += delta, in place; returns its norm, or itself without a norm."""
        if weight is None:
            return residual.add_(delta)
        out = torch.empty_like(residual)
        self.kernels.add_rms_norm(out, residual, delta, weight, self.config.eps)
        return out
