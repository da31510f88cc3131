"""From a checkpoint, a safetensors folder or a GGUF file, to a ready `Decoder`.

Each thread reads one tensor at a time, turns it to float32, packs it and drops the
plain copy, so no two float32 copies of a model ever stand in memory. Every weight that
is missing, left over or of the wrong shape stops the load by name. Never unpickles,
never runs a model folder's code. Knows nothing of requests. Chapter 17 places it.
"""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagedattn.errors import NotSupported, UserError
from pagedattn.model import gguf
from pagedattn.model.decoder import (
    MLP,
    Attention,
    Decoder,
    GroupedMLP,
    Layer,
    ModelSpec,
    Norms,
    Router,
    SparseMLP,
)
from pagedattn.model.families import DecoderConfig, LayerConfig, decoder_config
from pagedattn.model.linear import Linear
from pagedattn.model.rope import cos_sin_table
from pagedattn.model.source import Source

Progress = Callable[[int, int], None]


class Reader(Protocol):
    """A checkpoint's tensors under their Hugging Face names."""

    keys: Collection[str]

    def key(self, name: str) -> str | None:
        """The file's own name for what holds weight `name`, None if it's not there."""
        ...

    def read(self, name: str) -> Tensor:
        """Weight `name` in the file's precision, or float32 where it is quantised."""
        ...


# ---- What can be known without touching weights


def load_config(source: Source) -> dict[str, Any]:
    """The model's configuration in config.json's terms; reads no weights.

    Raises UserError where a folder has no readable config.json, NotSupported for a
    GGUF architecture that isn't built.
    """
    if source.kind == "gguf":
        return gguf.config(gguf.read_header(source.path))
    return _read_json(source.path / "config.json")


def generation_config(source: Source) -> dict[str, Any]:
    """The model's own sampling defaults; `eos_token_id` is always a list, maybe empty.

    From generation_config.json, else config.json's token ids; from a GGUF file's
    metadata.
    """
    if source.kind == "gguf":
        return gguf.generation_config(gguf.read_metadata(source.path))
    path = source.path / "generation_config.json"
    found = _read_json(path) if path.exists() else {}
    config = load_config(source)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    eos = found.get("eos_token_id")
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return found | {"eos_token_id": ends}


def model_spec(source: Source) -> ModelSpec:
    """What the engine must know before it loads: sizes, windows, longest context.

    Raises NotSupported for an architecture or feature that isn't built.
    """
    return _spec(decoder_config(load_config(source)))


def _spec(config: DecoderConfig) -> ModelSpec:
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        windows=tuple(layer.window for layer in config.layers),
        max_model_len=config.max_model_len,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "model") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}", "model") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a JSON object", "model")
    return found


# ---- Loading


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's weights go, and the dtype in which it computes there."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


def load(
    source: Source,
    kernels: ModuleType,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> Decoder:
    """The model at `source`, computing with `kernels` up to `max_model_len` positions.

    None takes the checkpoint's own length. Scalings that depend on length are fixed
    by it. `progress(done, total)` counts the file's tensors. Raises UserError naming
    each missing, unexpected or misshapen weight.
    """
    config, reader = open_checkpoint(source)
    weights = Weights(reader, progress, placement)
    length = max_model_len or config.max_model_len
    with _one_torch_thread() as threads:
        model = build(config, weights, kernels, length, threads)
    weights.check_all_taken(_harmless(config), config.names.ignored)
    return model


@contextmanager
def _one_torch_thread() -> Iterator[int]:
    """Each copy and packing in one thread, the others left to other layers; yields how
    many there are.

    Torch's idle threads spin for work between hundreds of small steps, which costs
    the demo model 4.4 CPU seconds instead of 2.4.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def open_checkpoint(source: Source) -> tuple[DecoderConfig, Reader]:
    """What the decoder must be and where its weights lie; no weight is read yet."""
    if source.kind == "hf":
        return decoder_config(load_config(source)), Shards(source.path)
    header = gguf.read_header(source.path)
    # A GGUF file's norm weights already hold Gemma's + 1.
    config = replace(decoder_config(gguf.config(header)), norm_offset=0.0)
    return config, gguf.Tensors(header)


def build(
    config: DecoderConfig,
    weights: Weights,
    kernels: ModuleType,
    max_model_len: int,
    threads: int = 1,
) -> Decoder:
    """The decoder that `config` describes, so many layers made at a time."""
    return _Builder(config, weights, kernels, max_model_len, threads).decoder()


def _harmless(config: DecoderConfig) -> tuple[str, ...]:
    """Endings of weights that files carry and no model needs.

    Old exports store rotary frequencies; a tied head may be written out once more.
    """
    tied = ("lm_head.weight",) if config.tied else ()
    return ("rotary_emb.inv_freq", *tied, *gguf.HARMLESS)


class Weights:
    """Hands out a checkpoint's weights, each checked, and knows what nobody took."""

    def __init__(
        self,
        reader: Reader,
        progress: Progress | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.reader = reader
        self.progress = progress
        self.placement = placement or Placement()
        self.taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """Weight `name` of exactly `shape`, in its place."""
        return self.placed(self.take_as_stored(name, *shape))

    def placed(self, weight: Tensor) -> Tensor:
        """`weight` on the model's device, in its dtype."""
        return weight.to(self.placement.device).to(self.placement.dtype)

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        """Weight `name` in the file's precision; rows past `shape` are cut.

        A vocabulary padded beyond the configuration's has such rows.
        """
        key = self.reader.key(name)
        if key is None:
            raise UserError(f"the checkpoint lacks weight {name}", "model")
        tensor = self.reader.read(name)
        padded = name.endswith(PADDED) and tensor.shape[0] > shape[0]
        tensor = tensor[: shape[0]] if padded else tensor
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"weight {name} has shape {tuple(tensor.shape)}, "
                f"the configuration asks for {shape}",
                "model",
            )
        self.taken.add(key)
        if self.progress is not None:
            self.progress(len(self.taken), len(self.reader.keys))
        return tensor

    def check_all_taken(
        self, harmless: tuple[str, ...], ignored: tuple[str, ...]
    ) -> None:
        """Raise UserError naming what no part of the model asked for.

        But for names that end as in `harmless` or start as in `ignored`.
        """
        left = sorted(set(self.reader.keys) - self.taken)
        left = [
            n for n in left if not n.endswith(harmless) and not n.startswith(ignored)
        ]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise UserError(
                f"unexpected weights in the checkpoint: {', '.join(left[:5])}{more}",
                "model",
            )


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PADDED = (EMBEDDING, HEAD)


class _Builder:
    """Takes weights and packs them, layer by layer, one layer in each thread."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        kernels: ModuleType,
        max_model_len: int,
        threads: int,
    ) -> None:
        self.threads = threads
        self.config = config
        self.weights = weights
        self.kernels = kernels
        ropes = {layer.rope for layer in config.layers if layer.rope}
        device = weights.placement.device
        self.tables = {
            rope: kernels.native(cos_sin_table(rope, max_model_len).to(device))
            for rope in ropes
        }

    def decoder(self) -> Decoder:
        """The whole model."""
        c, root = self.config, self.config.names.root
        vocabulary = c.vocab_size, c.hidden_size
        embedding = self.weights.take_as_stored(root + EMBEDDING, *vocabulary)
        if self.weights.placement.device.type != "cpu":
            embedding = self.weights.placed(embedding)
        with ThreadPoolExecutor(self.threads) as cores:
            layers = tuple(cores.map(self._layer, range(len(c.layers)), c.layers))
        return Decoder(
            spec=_spec(c),
            config=c,
            embedding=embedding,
            layers=layers,
            norm=self._norm(f"{root}model.norm", c.hidden_size),
            head=self._head(embedding),
            kernels=self.kernels,
            dtype=self.weights.placement.dtype,
        )

    def _head(self, embedding: Tensor) -> Linear:
        """Its own weight, or the embedding's when tied; never made up."""
        if self.config.tied:
            return Linear(self.weights.placed(embedding))
        name = self.config.names.root + HEAD
        if self.weights.reader.key(name) is None:
            raise UserError(
                "the configuration says tie_word_embeddings=false, but the checkpoint "
                f"lacks {name}: set it to true if the head is the embedding",
                "model",
            )
        return Linear(self.weights.take(name, *embedding.shape))

    def _layer(self, i: int, layer: LayerConfig) -> Layer:
        prefix = f"{self.config.names.root}model.layers.{i}."
        size = self.config.hidden_size
        norms = (n and self._norm(prefix + n, size) for n in self.config.names.norms)
        return Layer(
            norms=Norms(*norms),
            attention=self._attention(prefix, layer),
            mlp=self._sparse(prefix) if layer.sparse else self._dense(prefix + "mlp."),
        )

    def _attention(self, prefix: str, layer: LayerConfig) -> Attention:
        c = self.config
        heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        norm = prefix + "self_attn.{}_norm"
        return Attention(
            qkv=self._fused(prefix, c.names.qkv, (heads, kv, kv), c.qkv_bias),
            out=self._down(prefix + "self_attn.o_proj", heads, c.o_bias),
            q_norm=self._qk_norm(norm.format("q"), heads),
            k_norm=self._qk_norm(norm.format("k"), kv),
            cos_sin=self.tables[layer.rope] if layer.rope else None,
            window=layer.window,
            config=c,
            kernels=self.kernels,
        )

    def _dense(self, prefix: str) -> MLP:
        names = self.config.names
        width = self.config.intermediate_size
        return self._mlp(prefix, (*names.gate_up, names.down), width)

    def _mlp(self, prefix: str, names: tuple[str, ...], width: int) -> MLP:
        *gate_up, down = names
        bias = self.config.mlp_bias
        return MLP(
            gate_up=self._fused(prefix, gate_up, (width, width), bias),
            down=self._down(prefix + down, width, bias),
            activation=self.config.activation,
            kernels=self.kernels,
        )

    def _sparse(self, prefix: str) -> SparseMLP | GroupedMLP:
        e, names, size = self.config.experts, self.config.names, self.config.hidden_size
        prefix += f"{names.sparse}."
        shared, gate = prefix + "shared_expert.", prefix + "shared_expert_gate"
        router = Router(
            scores=self._linear(prefix + "gate", e.count, size, False),
            top_k=e.top_k,
            normalise=e.normalise,
            shared=e.shared_size and self._mlp(shared, names.expert, e.shared_size),
            shared_gate=e.shared_size and self._linear(gate, 1, size, False),
        )
        each = [f"{prefix}experts.{n}." for n in range(e.count)]
        if hasattr(self.kernels, "grouped_linear"):
            return self._grouped(router, each)
        experts = (self._mlp(prefix, names.expert, e.size) for prefix in each)
        return SparseMLP(router, tuple(experts))

    def _grouped(self, router: Router, prefixes: Sequence[str]) -> GroupedMLP:
        """All experts' weights side by side."""
        c, width = self.config, self.config.experts.size
        *gate_up, down = c.names.expert
        return GroupedMLP(
            router=router,
            gate_up=self._stacked(prefixes, gate_up, 2 * width, c.hidden_size),
            down=self._stacked(prefixes, [down], c.hidden_size, width),
            activation=c.activation,
            kernels=self.kernels,
        )

    def _stacked(
        self, prefixes: Sequence[str], names: Sequence[str], rows: int, width: int
    ) -> Tensor:
        """[experts, rows, width]: each expert's weights of these names, one below the
        other; no second copy of all of them ever stands in memory."""
        place, part = self.weights.placement, rows // len(names)
        shape = len(prefixes), rows, width
        out = torch.empty(shape, device=place.device, dtype=place.dtype)
        for expert, prefix in zip(out, prefixes, strict=True):
            for target, name in zip(expert.split(part), names, strict=True):
                weight = f"{prefix}{name}.weight"
                target.copy_(self.weights.take_as_stored(weight, part, width))
        return out

    # Differences that need no step of their own are folded into the weights here:
    # Gemma's norms are 1 + w, Granite scales what a block adds to the residual.
    def _norm(self, name: str, size: int) -> Any:
        stored = self.weights.take_as_stored(f"{name}.weight", size)
        weight = stored.to(self.weights.placement.device).float()
        return self.kernels.native(weight + self.config.norm_offset)

    def _qk_norm(self, name: str, width: int) -> Any | None:
        kind = self.config.qk_norm
        if kind is None:
            return None
        return self._norm(name, self.config.head_dim if kind == "head" else width)

    def _down(self, name: str, width: int, biased: bool) -> Linear:
        scale = self.config.residual_scale
        weight, bias = self._pair(name, self.config.hidden_size, width, biased)
        if scale == 1.0:
            return Linear(weight, bias)
        return Linear(weight * scale, None if bias is None else bias * scale)

    def _linear(self, name: str, rows: int, width: int, biased: bool) -> Linear:
        return Linear(*self._pair(name, rows, width, biased))

    def _fused(
        self, prefix: str, names: Iterable[str], rows: tuple[int, ...], biased: bool
    ) -> Linear:
        """Several products of one input as one, whether or not the file fuses them."""
        names = tuple(names)
        rows = rows if len(names) > 1 else (sum(rows),)
        size = self.config.hidden_size
        pairs = (
            self._pair(prefix + name, n, size, biased)
            for name, n in zip(names, rows, strict=True)
        )
        weights, biases = zip(*pairs, strict=True)
        return Linear.fused(weights, biases)

    def _pair(
        self, name: str, rows: int, width: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.weights.take(f"{name}.weight", rows, width)
        return weight, self.weights.take(f"{name}.bias", rows) if biased else None


# ---- safetensors: eight bytes of header length, a JSON header, then the data
_DTYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
}
_MAX_HEADER = 100_000_000  # the format's own limit


class Shards:
    """The safetensors files of a folder, read tensor by tensor without mapping them.

    A mapped file counts as this process's memory once touched; plain reads don't.
    """

    def __init__(self, folder: Path) -> None:
        self.where: dict[str, tuple[Path, Mapping[str, Any], int]] = {}
        for path in _shard_files(folder):
            header, start = _read_header(path)
            self.where |= {name: (path, info, start) for name, info in header.items()}
        self.keys: Collection[str] = self.where.keys()

    def key(self, name: str) -> str | None:
        """`name` itself: the files use Hugging Face names."""
        return name if name in self.where else None

    def read(self, name: str) -> Tensor:
        """Weight `name` in the file's precision."""
        path, info, start = self.where[name]
        if info["dtype"] not in _DTYPES:
            raise NotSupported(
                f"weight {name} is stored as {info['dtype']}; supported: "
                f"{', '.join(_DTYPES)}",
                "model",
            )
        stored, dtype = _DTYPES[info["dtype"]]
        begin, end = info["data_offsets"]
        count = (end - begin) // np.dtype(stored).itemsize
        data = np.fromfile(path, stored, count, offset=start + begin)
        return torch.from_numpy(data).view(dtype).reshape(info["shape"])


def _shard_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights; UserError where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(_read_json(index)["weight_map"].values())
        # Names come from the model's author: keep only their last part, so that no
        # file outside the folder is ever opened.
        return [_existing(folder / Path(name).name) for name in sorted(names)]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    pickled = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
    why = f", only {pickled[0]}, which could run code when read" if pickled else ""
    raise UserError(
        f"{folder} holds no .safetensors file{why}; only safetensors are read", "model"
    )


def _existing(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path} is named in the index but does not exist", "model")
    return path


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Each tensor's dtype, shape and offsets, and where the data starts.

    Raises UserError for a file that is cut short or no safetensors file at all.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise UserError(f"{path} is not a safetensors file", "model")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ends = [info["data_offsets"][1] for info in header.values()]
    if 8 + length + max(ends, default=0) > size:
        raise UserError(f"{path} is cut short: download it again", "model")
    return header, 8 + length
