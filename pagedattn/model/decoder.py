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
    read. Single tokens go through the decode kernel, longer pieces through prefill;
    where all contexts begin alike, and no window hides that, all go through cascade."""

    positions: Array  # [T]
    slots: Array  # [T]
    num_decodes: int
    decode: tuple[Array, ...]  # tables and lengths of the first num_decodes requests
    prefill: tuple[Array, ...]  # tables, query starts, lengths of the others
    cascade: tuple[Any, ...]  # the same of all, and what they share; else empty


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
        (tables, native(batch.query_starts), lengths, batch.shared)
        if batch.shared
        else (),
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

    def store(
        self, x: Array, reach: Reach, cache: LayerCache, scratch: Scratch
    ) -> None:
        """Queries, keys and values of x [T, hidden]; the latter are written."""
        q, k, v = self.project(x, scratch)
        caches = self.kernels.native(cache.k), self.kernels.native(cache.v)
        if self.cos_sin is None:
            self.kernels.write_kv(k, v, *caches, reach.slots)
        else:
            where = reach.positions, self.cos_sin
            self.kernels.rotary_write(q, k, v, *where, *caches, reach.slots)

    def read(self, reach: Reach, cache: LayerCache, scratch: Scratch) -> None:
        """What the batch's queries, where `store` has put them, read: [T, H, D].

        Between `store` and `close` this alone knows how tokens belong to requests.
        """
        n = len(reach.positions)
        out = scratch("read", n, self.config.heads, self.config.head_dim)
        q = self._heads(scratch("qkv", n, self.qkv.out_features))[0]
        caches = self.kernels.native(cache.k), self.kernels.native(cache.v)
        self._read(out, q, caches, reach)

    def close(self, out: Array, scratch: Scratch) -> None:
        """out [T, hidden]: what was read, projected."""
        read = scratch("read", len(out), self.config.heads, self.config.head_dim)
        self.out.into(out, read.reshape(len(out), -1))

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """q [T, H, D], k and v [T, KVH, D]: views."""
        c = self.config
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        k0, v0 = c.heads, c.heads + c.kv_heads
        return heads[:, :k0], heads[:, k0:v0], heads[:, v0:]

    def project(self, x: Array, scratch: Scratch) -> tuple[Array, Array, Array]:
        """q [T, H, D], k and v [T, KVH, D]: views of one product, normed in place."""
        c, rows = self.config, len(x)
        qkv = scratch("qkv", rows, self.qkv.out_features)
        self.qkv.into(qkv, x)
        k0, v0 = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
        self._norm(qkv[:, :k0], self.q_norm)
        self._norm(qkv[:, k0:v0], self.k_norm)
        return self._heads(qkv)

    def _norm(self, x: Array, weight: Array | None) -> None:
        """x [T, width] in place: as a whole, or each head by itself."""
        if weight is not None:
            rows = x.reshape(len(x), -1, len(weight))
            self.kernels.rms_norm(rows, rows, weight, self.config.eps)

    def _read(self, out: Array, q: Array, caches: tuple, reach: Reach) -> None:
        n = reach.num_decodes
        traits = self.config.attention_scale, self.window, self.config.softcap
        if reach.cascade and not self.window:
            scale, _, softcap = traits
            self.kernels.cascade_attention(
                out, q, *caches, *reach.cascade, scale, softcap
            )
            return
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
class Router:
    """Which experts a token visits and how much each counts; and what every token
    gets: the `shared` expert behind its own gate, or nothing."""

    scores: Linear
    top_k: int
    normalise: bool
    shared: MLP | None
    shared_gate: Linear | None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights float32, experts int64), both [T, top_k], of x [T, hidden]."""
        weights, chosen = self.scores(x).float().softmax(-1).topk(self.top_k)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def share(self, out: Tensor, x: Tensor, scratch: Scratch) -> None:
        """out = what every token gets."""
        if self.shared is None or self.shared_gate is None:
            out.zero_()
        else:
            gate = self.shared_gate(x).sigmoid()
            torch.mul(visit(self.shared, x, scratch), gate, out=out)


def visit(expert: MLP, x: Tensor, scratch: Scratch) -> Tensor:
    """What an expert makes of x [rows, hidden]."""
    out = torch.empty_like(x)
    native = expert.kernels.native
    expert(native(out), native(x), scratch)
    return out


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """A mixture of experts: each token visits some, weighted by the router.

    Tokens are grouped by expert, so an expert runs once per batch and one that no
    token chose doesn't run.
    """

    router: Router
    experts: tuple[MLP, ...]

    def __call__(self, out: Array, x: Array, scratch: Scratch) -> None:
        """x [T, hidden] -> out [T, hidden]."""
        out, x = torch.as_tensor(out), torch.as_tensor(x)
        weights, chosen = self.router.choose(x)
        self.router.share(out, x, scratch)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            routed = visit(self.experts[expert], x[rows], scratch)
            out.index_add_(0, rows, routed * weights[rows, place, None])


class Visits(NamedTuple):
    """Who visits which expert: V visits, sorted by expert; all on the device."""

    sources: Tensor  # [V] int64: the token of each
    starts: Tensor  # [experts + 1] int64: where each expert's visits begin
    places: Tensor  # [T, top_k] int64: where each token's visits stand


def visits(chosen: Tensor, experts: int) -> Visits:
    """The visits that `chosen` [T, top_k] asks for. Their number is known without
    asking the device, which sorts them itself."""
    flat, count = chosen.flatten(), torch.arange(chosen.numel(), device=chosen.device)
    order = flat.argsort(stable=True)
    bounds = torch.arange(experts + 1, device=flat.device)
    places = torch.empty_like(order).scatter_(0, order, count)
    return Visits(
        order // chosen.shape[1],
        torch.searchsorted(flat[order], bounds),
        places.view_as(chosen),
    )


@dataclass(frozen=True, slots=True)
class GroupedMLP:
    """A mixture of experts on a device that must not be asked what its router chose:
    all experts' products at once, launched alike whoever is visited (`visits`)."""

    router: Router
    gate_up: Tensor  # [experts, 2 width, hidden]
    down: Tensor  # [experts, hidden, width]
    activation: str
    kernels: ModuleType

    def __call__(self, out: Array, x: Array, scratch: Scratch) -> None:
        """x [T, hidden] -> out [T, hidden]. Each token's visits are summed in the order
        of their weights, whoever else is in the batch."""
        weights, chosen = self.router.choose(x)
        self.router.share(out, x, scratch)
        experts, size, width = self.down.shape
        sources, starts, places = visits(chosen, experts)
        rows, k = len(sources), self.kernels
        gate_up, hidden, each = (
            scratch(name, rows, n)
            for name, n in (("gate_up", 2 * width), ("hidden", width), ("each", size))
        )
        k.grouped_linear(gate_up, x, self.gate_up, sources, starts)
        getattr(k, f"{self.activation}_mul")(hidden, gate_up)
        own = torch.arange(rows, device=sources.device)
        k.grouped_linear(each, hidden, self.down, own, starts)
        out.add_((each[places] * weights[:, :, None]).sum(1))


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and an MLP on the residual stream, with their norms."""

    norms: Norms
    attention: Attention
    mlp: MLP | SparseMLP | GroupedMLP


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass under way: what its layers read of the batch, and the residual
    stream beside what the last block adds to it, so that adding and normalising are
    one kernel. Arrays [T, hidden]."""

    ids: Tensor
    reaches: list[Reach]  # one for each group
    caches: list[LayerCache]
    residual: Array
    x: Array
    delta: Array


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

        The result stands in memory that the next call uses again.
        """
        this = self.begin(batch, caches)
        for i in range(len(self.layers)):
            self.dense(this, i)
            self.read(this, i)
        return self.dense(this, len(self.layers))

    # The same in pieces: what lies between two reads works on tokens, whosever they
    # are, and can be recorded or compiled for a number of them.
    def begin(self, batch: Batch, caches: list[LayerCache]) -> Pass:
        """A pass that has computed nothing yet."""
        shape = len(batch.ids), self.embedding.shape[1]
        stream = (self.scratch(name, *shape) for name in ("residual", "x", "delta"))
        groups = range(len(batch.tables))
        reaches = [reach(batch, group, self.kernels) for group in groups]
        return Pass(batch.ids, reaches, caches, *stream)

    @torch.no_grad()
    def dense(self, this: Pass, i: int) -> Tensor | None:
        """All between the reads of layers i - 1 and i; behind the last one, the hidden
        states."""
        if i == 0:
            self._embed(this)
        else:
            self.leave(this, self.layers[i - 1])
        if i == len(self.layers):
            return torch.as_tensor(self.normed(this, self.norm))
        cache, layer = this.caches[i], self.layers[i]
        x = self.normed(this, layer.norms.before_attention)
        layer.attention.store(x, this.reaches[cache.group], cache, self.scratch)
        return None

    @torch.no_grad()
    def read(self, this: Pass, i: int) -> None:
        """Attention of layer i over what stands in the cache by now. `this` may have
        fewer tokens than the pass whose `dense` was called; they are the first."""
        cache = this.caches[i]
        reach = this.reaches[cache.group]
        self.layers[i].attention.read(reach, cache, self.scratch)

    def leave(self, this: Pass, layer: Layer) -> None:
        """From what the layer's attention has read to what its MLP adds."""
        norms = layer.norms
        layer.attention.close(this.delta, self.scratch)
        self._norm(this.delta, norms.after_attention)
        x = self.normed(this, norms.before_mlp)
        layer.mlp(this.delta, x, self.scratch)
        self._norm(this.delta, norms.after_mlp)

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

    def _embed(self, this: Pass) -> None:
        """The residual stream's first numbers, and nothing to add to them."""
        rows = F.embedding(this.ids, self.embedding)
        torch.as_tensor(this.residual).copy_(rows).mul_(self.config.embed_scale)
        this.delta[:] = 0.0

    def _norm(self, x: Array, weight: Array | None) -> None:
        """x normalised in place, or as it is without a norm."""
        if weight is not None:
            self.kernels.rms_norm(x, x, weight, self.config.eps)

    def normed(self, this: Pass, weight: Array | None) -> Array:
        """residual += delta, in place; its norm in x, or itself without a norm."""
        x, residual, delta = this.x, this.residual, this.delta
        if weight is None:
            residual += delta
            return residual
        self.kernels.add_rms_norm(x, residual, delta, weight, self.config.eps)
        return x
