"""Tiny seeded models made from transformers' own configurations, and how to run ours.

Knows transformers, the loader and the batch layout; what is checked stands in the
tests. Weights are drawn so that attention is peaked and logits are spread, so that a
wrong window, scale or norm shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pagedattn.kernels import spec as kernels
from torch import Tensor

from pagedattn.model import loader
from pagedattn.model.batch import Batch, LayerCache
from pagedattn.model.decoder import Decoder
from pagedattn.model.source import Source

VOCAB, BLOCK, CONTEXT = 160, 4, 256
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def config(architecture: str, **changes: Any) -> Any:
    """transformers' configuration for `architecture`, tiny, with `changes`."""
    kind = getattr(transformers, architecture).config_class
    found = kind(**(SIZES | changes))
    found.architectures = [architecture]
    return found


def reference(architecture: str, **changes: Any) -> Any:
    """A seeded transformers model, float32, eager attention."""
    torch.manual_seed(0)
    settings = config(architecture, **changes)
    settings._attn_implementation = "eager"
    return redrawn(getattr(transformers, architecture)(settings), architecture)


@torch.no_grad()
def redrawn(model: Any, architecture: str) -> Any:
    """`model`, float32, with weights that make mistakes visible."""
    model = model.eval().float()
    for name, weight in model.named_parameters():
        weight.copy_(_drawn(name, weight, architecture))
    model.tie_weights()
    return model


def _drawn(name: str, weight: Tensor, architecture: str) -> Tensor:
    noise = torch.randn_like(weight)
    if "norm" in name:
        return 0.3 * noise + (0.0 if "Gemma" in architecture else 1.0)
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name:
        return 0.4 * noise
    peaked = any(part in name for part in ("q_proj", "k_proj", "qkv_proj"))
    gain = 2.0 if peaked or "lm_head" in name else 4.0 if "mlp.gate." in name else 1.0
    return gain * noise * weight.shape[-1] ** -0.5


def saved(model: Any, folder: Path) -> Source:
    """`model` as a Hugging Face folder."""
    model.save_pretrained(folder)
    return Source("hf", folder, "tiny")


def prompt(length: int, seed: int = 1) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """transformers' logits at each position, in one forward pass without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@dataclass
class Request:
    """A sequence and how much of it has been computed."""

    ids: list[int]
    computed: int = 0


class Paged:
    """Runs a decoder through paged caches: shuffled block ids, a group per window."""

    def __init__(
        self, model: Decoder, requests: int = 1, length: int = CONTEXT
    ) -> None:
        self.model = model
        spec = model.spec
        windows = sorted(set(spec.windows))
        per_table = -(-length // BLOCK)
        blocks = 1 + len(windows) * requests * per_table
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(7))
        self.tables = (1 + order.int()).view(len(windows), requests, per_table)
        self.caches = []
        for window in spec.windows:
            k, v = (
                torch.full((blocks, spec.kv_heads, BLOCK, spec.head_dim), torch.nan)
                for _ in range(2)
            )
            self.caches.append(LayerCache(k, v, windows.index(window)))

    def step(self, requests: list[Request], takes: list[int]) -> list[Tensor]:
        """Compute each request's next `takes` tokens; the logits of all of them."""
        requests_, takes_ = zip(
            *sorted(zip(requests, takes, strict=True), key=lambda pair: pair[1] != 1),
            strict=True,
        )
        ids, positions, slots = [], [], []
        rows = [requests.index(request) for request in requests_]
        tables = self.tables[:, rows]
        for s, (request, take) in enumerate(zip(requests_, takes_, strict=True)):
            at = torch.arange(request.computed, request.computed + take)
            ids += request.ids[request.computed : request.computed + take]
            positions.append(at)
            slots.append(tables[:, s, at // BLOCK].long() * BLOCK + at % BLOCK)
            request.computed += take
        starts = torch.tensor([0, *takes_]).cumsum(0).int()
        batch = Batch(
            ids=torch.tensor(ids),
            positions=torch.cat(positions),
            slots=torch.cat(slots, dim=1),
            tables=tables.contiguous(),
            query_starts=starts,
            lengths=torch.tensor([r.computed for r in requests_], dtype=torch.int32),
            num_decodes=sum(take == 1 for take in takes_),
            rows=torch.arange(len(ids)),
        )
        hidden = self.model.forward(batch, self.caches)[batch.rows]
        logits = self.model.logits(hidden).clone()
        pieces = dict(
            zip(rows, logits.split([int(take) for take in takes_]), strict=True)
        )
        return [pieces[i] for i in range(len(requests))]

    def logits(self, ids: list[int], chunks: list[int]) -> Tensor:
        """Logits at every position of `ids`, in pieces of `chunks` tokens, repeated."""
        request, found, turn = Request(ids), [], 0
        while request.computed < len(ids):
            take = min(chunks[turn % len(chunks)], len(ids) - request.computed)
            found += self.step([request], [take])
            turn += 1
        return torch.cat(found)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """`count` tokens after `ids`, each the most likely, one at a time."""
        request = Request(list(ids))
        for _ in range(count):
            behind = len(request.ids) - request.computed
            logits = self.step([request], [behind])[0]
            request.ids.append(int(logits[-1].argmax()))
        return request.ids[len(ids) :]


def load(source: Source, max_model_len: int | None = None) -> Decoder:
    """Our decoder for `source`, on the specification kernels."""
    return loader.load(source, kernels, max_model_len)
