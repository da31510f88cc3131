"""Models for tests: an exact one, whose every token proves that the cache was right,
and a tiny real one with a tokenizer.

`HashModel` runs in the real runner through real batches and block tables, in int64:
its next token depends on every earlier token, in order, at its position. Any block
that was lost, shared wrongly, read late or written twice changes what it says. Built
in chapter 05.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagedattn.cache.tables import LayerGroup, group_layers
from pagedattn.config import EngineConfig
from pagedattn.engine import Engine
from pagedattn.intake import Intake
from pagedattn.metrics import Metrics
from pagedattn.model.batch import Batch, LayerCache
from pagedattn.request import Request
from pagedattn.runner import Runner
from pagedattn.sampling.grammar import Grammars
from pagedattn.sampling.sampler import sample
from pagedattn.sampling.state import SampleState
from pagedattn.scheduler import Scheduler

VOCABULARY = 1 << 16
CANDIDATES = 4  # tokens with a chance at each position, for sampling tests
POISON = 0x5EED_DEAD_5EED_DEAD


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 -> uint64, every bit of x moves half the bits."""
    x = np.asarray(x, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embed(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """H(token, position), what layer one stores."""
    return mix(tokens.astype(np.uint64) * np.uint64(1 << 32) + positions + np.uint64(1))


def attend(values: np.ndarray) -> np.uint64:
    """H(values, in order), what a layer makes of all that its attention read."""
    order = np.arange(1, len(values) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mix(mix(values + order).sum(dtype=np.uint64) + np.uint64(len(values)))


def hash_logits(hidden: np.ndarray) -> Tensor:
    """Logits [R, VOCABULARY] in which each of `hidden` names its few candidates."""
    logits = torch.full((len(hidden), VOCABULARY), -30.0)
    for row, h in enumerate(hidden):
        for rank in range(CANDIDATES):
            token = int(mix(h + np.uint64(rank))) % VOCABULARY
            logits[row, token] = 4.0 - rank
    return logits


@dataclass(frozen=True, slots=True)
class HashSpec:
    """What the engine must know of a `HashModel`."""

    windows: tuple[int, int] = (0, 0)
    vocab_size: int = VOCABULARY


class HashModel:
    """Two layers of attention over hashes; `windows` as any model's."""

    def __init__(self, windows: tuple[int, int] = (0, 0)) -> None:
        self.spec = HashSpec(windows)
        self._values = np.zeros(0, dtype=np.uint64)

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Hashes [T] int64: what layer two read at each token."""
        this = self.begin(batch, caches)
        for i in range(len(self.spec.windows)):
            self.dense(this, i)
            self.read(this, i)
        hidden = self.dense(this, len(self.spec.windows))
        assert hidden is not None
        return hidden

    # In pieces, as a decoder; what passes between them stands in one place.
    def begin(
        self, batch: Batch, caches: list[LayerCache]
    ) -> tuple[Batch, list[LayerCache]]:
        """A pass that has computed nothing yet."""
        return batch, caches

    def dense(self, this: tuple[Batch, list[LayerCache]], i: int) -> Tensor | None:
        """Write layer i's keys; behind the last layer, the hashes."""
        batch, caches = this
        n = len(batch.ids)
        if len(self._values) < n:
            self._values = np.zeros(n, dtype=np.uint64)
        if i == 0:
            places = batch.positions.numpy().astype(np.uint64)
            self._values[:n] = embed(batch.ids.numpy(), places)
        if i == len(caches):
            return torch.from_numpy(self._values[:n].view(np.int64))
        keys = caches[i].k.numpy().view(np.uint64)  # [slots]
        keys[batch.slots[caches[i].group].numpy()] = self._values[:n]
        return None

    def read(self, this: tuple[Batch, list[LayerCache]], i: int) -> None:
        """Layer i's attention, over the keys that are written by now."""
        batch, caches = this
        keys = caches[i].k.numpy().view(np.uint64)
        found = self._layer(batch, caches[i], keys, self.spec.windows[i])
        self._values[: len(found)] = found

    def _layer(
        self, batch: Batch, cache: LayerCache, keys: np.ndarray, window: int
    ) -> np.ndarray:
        block_size = len(keys) // cache.v.numel()
        read = []
        for s, (begin, end) in enumerate(pairwise(batch.query_starts.tolist())):
            table = batch.tables[cache.group, s].numpy().astype(np.int64)
            for position in batch.positions[begin:end].tolist():
                first = max(0, position + 1 - window) if window else 0
                p = np.arange(first, position + 1)
                slots = table[p // block_size] * block_size + p % block_size
                read.append(attend(keys[slots]))
        return np.array(read, dtype=np.uint64)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, VOCABULARY] of hashes [R]."""
        return hash_logits(hidden.numpy().view(np.uint64))


def hash_pieces() -> list[bytes]:
    """The bytes of `HashModel`'s tokens: most are two letters or digits or signs, the
    first 256 are one byte each."""
    signs = b"abcdefghijklmnopqrstuvwxyz0123456789 ,.:;{}[]\"'-+/\n"
    pairs = [bytes((a, b)) for a in signs for b in signs]
    rest = VOCABULARY - 256
    return [bytes([i]) for i in range(256)] + [
        pairs[i % len(pairs)] for i in range(rest)
    ]


def hash_grammars(eos_ids: Sequence[int]) -> Grammars:
    """Grammars over `HashModel`'s vocabulary; `eos_ids` are no text."""
    return Grammars(hash_pieces, eos_ids, VOCABULARY, eos_ids)


def hash_runner(
    model: HashModel,
    groups: Sequence[LayerGroup],
    num_blocks: int,
    block_size: int,
    grammars: Grammars | None = None,
) -> Runner:
    """The real runner around a `HashModel`; its KV is one int64 for each slot."""

    def new_cache() -> tuple[Tensor, Tensor]:
        k = torch.full((num_blocks * block_size,), POISON, dtype=torch.int64)
        return k, torch.empty(num_blocks)  # v only says how many blocks there are

    return Runner(model, groups, block_size, new_cache, grammars)


def hash_engine(
    windows: tuple[int, int] = (0, 0),
    eos_ids: Sequence[int] = (),
    grammars: Grammars | None = None,
    **config: Any,
) -> Engine:
    """The real engine, token ids in and out, around a `HashModel`."""
    settled = EngineConfig(**config)
    groups = group_layers(windows)
    scheduler = Scheduler(settled, groups)
    capacity = scheduler.tables.capacity()
    model = HashModel(windows)
    sizes = settled.num_blocks, settled.block_size
    runner = hash_runner(model, groups, *sizes, grammars)
    check = None if grammars is None else grammars.check
    intake = Intake(settled, capacity, VOCABULARY, eos_ids, None, check)
    metrics = Metrics("hash", settled.max_model_len, {})
    return Engine(settled, scheduler, runner, intake, metrics)


def naive_hidden(tokens: Sequence[int], windows: tuple[int, int]) -> np.ndarray:
    """What `HashModel` computes at each position, with no cache and no blocks."""
    values = embed(np.array(tokens), np.arange(len(tokens), dtype=np.uint64))
    for window in windows:
        first = [max(0, p + 1 - window) if window else 0 for p in range(len(tokens))]
        values = np.array(
            [attend(values[f : p + 1]) for p, f in enumerate(first)], dtype=np.uint64
        )
    return values


def naive_generate(
    request: Request,
    windows: tuple[int, int] = (0, 0),
    grammars: Grammars | None = None,
) -> tuple[list[int], str]:
    """(output tokens, finish reason) of `request` alone, from its prompt: the truth."""
    wished = grammars is not None and request.params.structured_outputs is not None
    state = SampleState(
        request.params,
        request.seed,
        VOCABULARY,
        request.tokens[: request.prompt_len],
        sibling=request.sibling,
        eos_ids=request.eos_ids,
        bad_words_ids=request.bad_words_ids,
        grammar=grammars.matcher(request.params) if wished else None,
    )
    alone = Request(
        request.id,
        request.tokens[: request.prompt_len],
        request.params,
        request.limit,
        eos_ids=request.eos_ids,
    )
    while True:
        hidden = naive_hidden(alone.tokens, windows)
        token = sample(hash_logits(hidden[-1:]), [state])[0].token
        assert token is not None
        state.append(token)
        alone.tokens.append(token)
        ending = ("stop", None) if state.ended else alone.ending()
        if ending is not None:
            return alone.tokens[alone.prompt_len :], ending[0]


# A small real model on disk: random weights, a byte tokenizer, a chat template.
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    max_len: int = 512,
    eos: Sequence[int] = (257, 259),
    layers: int = 2,
    width: int = 32,
) -> Path:
    """Write a seeded Llama with spread logits and a byte-level tokenizer.

    4 heads, 2 KV heads, an MLP of twice the width. Ids 0 to 255 are bytes in GPT-2's
    alphabet order, then `SPECIALS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    vocabulary = 256 + len(SPECIALS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(eos), "bos_token_id": 256})
    )
    save_file(
        _tiny_weights(vocabulary, seed, layers, width), folder / "model.safetensors"
    )
    return folder


def _tiny_weights(
    vocabulary: int, seed: int, layers: int, hidden: int
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def random(rows: int, width: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, width, generator=draw) * gain / width**0.5

    weights = {
        "model.embed_tokens.weight": random(vocabulary, hidden, 6.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocabulary, hidden, 3.0),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, rows, width in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // 2, hidden),
            ("self_attn.v_proj", hidden // 2, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", 2 * hidden, hidden),
            ("mlp.up_proj", 2 * hidden, hidden),
            ("mlp.down_proj", hidden, 2 * hidden),
        ):
            weights[f"{layer}{name}.weight"] = random(rows, width, 2.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = torch.ones(hidden)
    return weights


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(list(SPECIALS))
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|eos|>",
                "chat_template": TEMPLATE,
            }
        )
    )
