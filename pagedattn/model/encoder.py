"""A BERT encoder: every token reads every other of its text, and there is no KV cache.

Knows BERT's and RoBERTa's computation, weights and configuration. A batch is packed:
the tokens of all texts in a row, no padding; only attention goes text by text. Knows
nothing of pooling, requests or tokens' spelling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedattn.errors import NotSupported, UserError
from pagedattn.model.linear import Linear
from pagedattn.model.loader import Progress, Shards, Weights, load_config
from pagedattn.model.source import Source

ARCHITECTURES = ("BertModel", "RobertaModel", "XLMRobertaModel")
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# What files carry and an embedding does not need: indices, and the head for BERT's
# second training task.
_UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes and traits. `first_position` is the row of the first token's position."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    positions: int
    first_position: int
    type_vocab_size: int
    eps: float
    activation: str
    max_model_len: int


def is_encoder(source: Source) -> bool:
    """Whether a model is an encoder; reads its configuration only."""
    if source.kind != "hf":
        return False
    names = load_config(source).get("architectures") or [""]
    return names[0].startswith(("Bert", "Roberta", "XLMRoberta"))


def encoder_config(source: Source) -> EncoderConfig:
    """What the encoder at `source` is; NotSupported where a trait isn't built.

    Its longest text is what sentence-transformers' file says, else all its positions.
    """
    config = load_config(source)
    name = (config.get("architectures") or [""])[0]
    if name not in ARCHITECTURES:
        raise NotSupported(
            f"architecture {name} is not built: of encoders there are "
            f"{', '.join(ARCHITECTURES)}; classifiers and cross-encoders are none.",
            "model",
        )
    _check_traits(config)
    first = 0 if name == "BertModel" else config.get("pad_token_id", 1) + 1
    longest = config["max_position_embeddings"] - first
    return EncoderConfig(
        architecture=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        positions=config["max_position_embeddings"],
        first_position=first,
        type_vocab_size=config.get("type_vocab_size", 2),
        eps=config.get("layer_norm_eps", 1e-12),
        activation=config.get("hidden_act", "gelu"),
        max_model_len=min(longest, _sentence_length(source) or longest),
    )


def _check_traits(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "gelu") not in _ACTIVATIONS:
        raise NotSupported(
            f"hidden_act={config['hidden_act']!r} is not built.", "model"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise NotSupported(
            f"position_embedding_type={config['position_embedding_type']!r} is not "
            "built; absolute positions are.",
            "model",
        )


def _sentence_length(source: Source) -> int | None:
    path = source.path / "sentence_bert_config.json"
    return (
        json.loads(path.read_text("utf-8")).get("max_seq_length")
        if path.is_file()
        else None
    )


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, along the last axis."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention, then an MLP; each is added to its input, and the sum normed."""

    qkv: Linear
    out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    mlp_norm: LayerNorm
    heads: int
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [T, hidden], texts of `lengths` in a row -> [T, hidden]."""
        x = self.attention_norm(x + self.out(self._attend(self.qkv(x), lengths)))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))

    def _attend(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """qkv [T, 3 hidden] -> [T, hidden]; no text reads another."""
        split = qkv.view(len(qkv), 3, self.heads, -1)  # [T, 3, heads, dim]
        read = []
        for piece in split.split(list(lengths)):
            q, k, v = piece.permute(1, 2, 0, 3)  # each [heads, n, dim]
            read.append(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])
        return torch.cat(read, dim=1).transpose(0, 1).reshape(len(qkv), -1)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Token ids of several texts -> a hidden state for each token."""

    config: EncoderConfig
    words: Tensor  # [vocab, hidden]
    places: Tensor  # [positions, hidden]: that of the position and of token type 0
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]

    @torch.inference_mode()
    def forward(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The last hidden states [n, hidden] of each text of n token ids."""
        lengths = [len(text) for text in texts]
        first = self.config.first_position
        ids = torch.tensor([i for text in texts for i in text])
        places = torch.cat([torch.arange(first, first + n) for n in lengths])
        x = self.norm(F.embedding(ids, self.words) + self.places[places])
        for layer in self.layers:
            x = layer(x, lengths)
        return list(x.split(lengths))


# From a checkpoint.
def load_encoder(source: Source, progress: Progress | None = None) -> Encoder:
    """The encoder at `source`; UserError naming each weight that is missing, left
    over or misshapen."""
    config = encoder_config(source)
    reader = Shards(source.path)
    prefix = next(
        (p for p in ("", "bert.", "roberta.") if reader.key(f"{p}{_WORDS}")), None
    )
    if prefix is None:
        raise UserError(f"the checkpoint lacks weight {_WORDS}", "model")
    weights = Weights(reader, progress)
    model = _Builder(config, weights, prefix).encoder()
    weights.check_all_taken(_UNUSED, ("cls.", "lm_head.") if prefix else ())
    return model


_WORDS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class _Builder:
    """Takes weights by their names and packs them."""

    config: EncoderConfig
    weights: Weights
    prefix: str

    def encoder(self) -> Encoder:
        c, at = self.config, f"{self.prefix}embeddings."
        size, take = c.hidden_size, self.weights.take
        kinds = take(f"{at}token_type_embeddings.weight", c.type_vocab_size, size)
        places = take(f"{at}position_embeddings.weight", c.positions, size)
        return Encoder(
            config=c,
            words=take(self.prefix + _WORDS, c.vocab_size, size),
            places=places + kinds[0],
            norm=self._norm(f"{at}LayerNorm"),
            layers=tuple(self._layer(i) for i in range(c.num_layers)),
        )

    def _layer(self, i: int) -> EncoderLayer:
        c, at = self.config, f"{self.prefix}encoder.layer.{i}."
        size, wide = c.hidden_size, c.intermediate_size
        parts = [
            self._pair(f"{at}attention.self.{name}", size, size)
            for name in ("query", "key", "value")
        ]
        return EncoderLayer(
            qkv=Linear.fused(*zip(*parts, strict=True)),
            out=Linear(*self._pair(f"{at}attention.output.dense", size, size)),
            attention_norm=self._norm(f"{at}attention.output.LayerNorm"),
            up=Linear(*self._pair(f"{at}intermediate.dense", wide, size)),
            down=Linear(*self._pair(f"{at}output.dense", size, wide)),
            mlp_norm=self._norm(f"{at}output.LayerNorm"),
            heads=c.heads,
            activation=_ACTIVATIONS[c.activation],
        )

    def _pair(self, name: str, rows: int, width: int) -> tuple[Tensor, Tensor]:
        take = self.weights.take
        return take(f"{name}.weight", rows, width), take(f"{name}.bias", rows)

    def _norm(self, name: str) -> LayerNorm:
        take, size = self.weights.take, self.config.hidden_size
        return LayerNorm(
            take(f"{name}.weight", size), take(f"{name}.bias", size), self.config.eps
        )
