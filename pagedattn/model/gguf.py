"""GGUF files: metadata, configuration in Hugging Face's terms, dequantised tensors.

Knows the container's layout and each architecture's keys; block formats and tensor
names are the `gguf` package's. Reads plainly instead of mapping, so a file costs no
memory once its tensors are packed. Knows nothing of decoders. Chapter 17 places it.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pagedattn.errors import NotSupported, UserError

QUANTS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
# Rotary factors are read with the configuration, not as weights.
HARMLESS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; `shape` is row-major, the reverse of the file's order."""

    shape: tuple[int, ...]
    quant: str
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the data: metadata as plain Python, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The file's metadata under its own keys, as str, int, float, bool and lists."""
    return read_header(path).metadata


def read_header(path: str | Path) -> Header:
    """Metadata and tensor directory; not to be changed, for the last one is kept.

    Raises UserError for what is no GGUF file or is cut short, NotSupported for a file
    that is one part of several.
    """
    stat = Path(path).stat()
    return _read_header(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)  # a start asks four times; 49k strings take 0.15 s
def _read_header(path: str | Path, changed: int, size: int) -> Header:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file", "model")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Cursor(data, 4).header(Path(path))
            except struct.error as error:
                raise UserError(f"{path} is cut short: {error}", "model") from error
    if header.metadata.get("split.count", 1) > 1:
        raise NotSupported(f"{path} is one part of several; merge them", "model")
    return header


# ---- The container. Numbers are little-endian; codes 8 and 9 are string and array.
_SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A position in the file's header that moves as values are read."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def header(self, path: Path) -> Header:
        """The whole header, tensor offsets counted from the start of the file."""
        version, tensors, pairs = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            raise NotSupported(f"GGUF version {version} is not supported", "model")
        metadata = {self.string(): self.value(self.number("I")) for _ in range(pairs)}
        infos = dict(self.tensor() for _ in range(tensors))
        align = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self.at // align) * align
        moved = {
            name: TensorInfo(info.shape, info.quant, start + info.offset)
            for name, info in infos.items()
        }
        return Header(path, metadata, moved)

    def number(self, code: str) -> Any:
        """One number of struct's type `code`."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        """One string: its length, then UTF-8."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings; the loop that a 262k vocabulary spends its time in."""
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        found = []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            found.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return found

    def value(self, code: int) -> Any:
        """One metadata value of the file's type `code`."""
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.number(_SCALARS[code])

    def array(self, code: int, count: int) -> list[Any]:
        """`count` values of one type."""
        if code == _STRING:
            return self.strings(count)
        if code == _ARRAY:
            return [self.value(code) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[code]}")
        found = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return list(found)

    def tensor(self) -> tuple[str, TensorInfo]:
        """One tensor's name and place, its offset counted from the data's start."""
        name = self.string()
        shape = tuple(self.number("Q") for _ in range(self.number("I")))[::-1]
        quant = gguf.GGMLQuantizationType(self.number("I")).name
        return name, TensorInfo(shape, quant, self.number("Q"))


# ---- Configuration. Left Hugging Face's field, right the file's key below `arch.`
_COMMON: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_WINDOW = {"sliding_window": "attention.sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_QWEN_EXPERTS = _EXPERTS | {"moe_intermediate_size": "expert_feed_forward_length"}


@dataclass(frozen=True, slots=True)
class Arch:
    """How a GGUF architecture maps to a family.

    `fields` come from the file as `_COMMON`'s do, `fixed` are what the format leaves
    unsaid. `permuted` where query and key rows are stored for interleaved rotation;
    `large` is the layer count of a Gemma whose queries are scaled by its width.
    """

    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    large: int | None = None


ARCHS: Mapping[str, Arch] = {
    "llama": Arch("LlamaForCausalLM", permuted=True),
    "qwen2": Arch("Qwen2ForCausalLM"),
    "qwen3": Arch("Qwen3ForCausalLM"),
    "smollm3": Arch("SmolLM3ForCausalLM", permuted=True),
    "gemma2": Arch("Gemma2ForCausalLM", _WINDOW | _CAPS, large=46),
    "gemma3": Arch(
        "Gemma3ForCausalLM",
        _WINDOW | _CAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
        large=62,
    ),
    "phi3": Arch("Phi3ForCausalLM", _WINDOW),
    "olmo2": Arch("Olmo2ForCausalLM", _WINDOW),
    "granite": Arch(
        "GraniteForCausalLM",
        {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        permuted=True,
    ),
    "qwen2moe": Arch(
        "Qwen2MoeForCausalLM",
        _QWEN_EXPERTS
        | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "qwen3moe": Arch(
        "Qwen3MoeForCausalLM", _QWEN_EXPERTS, fixed={"norm_topk_prob": True}
    ),
}
# Mixtral files carry Llama's name and differ by having experts.
_MIXTRAL = Arch("MixtralForCausalLM", _EXPERTS, permuted=True)


def arch_of(meta: Mapping[str, Any]) -> Arch:
    """The table entry for a file; NotSupported with the list where there is none."""
    name = meta.get("general.architecture")
    if name not in ARCHS:
        known = ", ".join(ARCHS)
        raise NotSupported(
            f"GGUF architecture {name!r} is not supported; supported: {known}", "model"
        )
    experts = name == "llama" and meta.get("llama.expert_count")
    return _MIXTRAL if experts else ARCHS[name]


def config(header: Header) -> dict[str, Any]:
    """The file's configuration in config.json's terms.

    Raises NotSupported naming an architecture or feature that isn't built, UserError
    naming a key that the file lacks.
    """
    meta, arch = header.metadata, arch_of(header.metadata)
    name = meta["general.architecture"]
    found = _fields(meta, name, {**_COMMON, **arch.fields})
    found |= {
        "architectures": [arch.architecture],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        **arch.fixed,
    }
    width = found["hidden_size"] // found["num_attention_heads"]
    head_dim = found.get("head_dim", width)
    if arch.large is not None:
        large = found["num_hidden_layers"] == arch.large
        found["query_pre_attn_scalar"] = width if large else head_dim
    return found | _rope(header, name, head_dim)


def _fields(
    meta: Mapping[str, Any], name: str, keys: Mapping[str, str]
) -> dict[str, Any]:
    found = {f: meta[f"{name}.{k}"] for f, k in keys.items() if f"{name}.{k}" in meta}
    for given, value in found.items():
        if isinstance(value, list):
            raise NotSupported(f"GGUF with {given} per layer is not supported", "model")
    for required in _REQUIRED:
        if required not in found:
            key = f"{name}.{keys[required]}"
            raise UserError(f"the GGUF file's metadata lacks {key}", "model")
    return found


def _rope(header: Header, name: str, head_dim: int) -> dict[str, Any]:
    """Scaling and partial rotation, in config.json's older spelling."""
    meta, key = header.metadata, f"{name}.rope."
    turned = meta.get(key + "dimension_count", head_dim)
    scaling: dict[str, Any] = {
        "rope_type": meta.get(key + "scaling.type", "none"),
        "factor": meta.get(key + "scaling.factor"),
    }
    if "rope_freqs.weight" in header.tensors:
        scaling = _rope_factors(header, "rope_freqs", "rope_freqs", 1.0)
    elif "rope_factors_long.weight" in header.tensors:
        scale = meta.get(key + "scaling.attn_factor")
        scaling |= _rope_factors(
            header, "rope_factors_short", "rope_factors_long", scale
        )
    elif scaling["rope_type"] == "none":
        scaling = {}
    return {"rope_scaling": scaling, "partial_rotary_factor": turned / head_dim}


def _rope_factors(
    header: Header, short: str, long: str, scale: float | None
) -> dict[str, Any]:
    """One factor per pair of dimensions, from tensors of the file.

    Llama 3 files hold what its scaling comes to, the same at every length.
    """

    def factors(name: str) -> list[float]:
        return read_rows(header, f"{name}.weight").view(np.float32).ravel().tolist()

    return {
        "rope_type": "longrope",
        "short_factor": factors(short),
        "long_factor": factors(long),
        "attention_factor": scale,
    }


def generation_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that begin, pad and end a text; `eos_token_id` is a list.

    A chat model's end of turn ends a text as well.
    """
    ends = (meta.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
    found = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": list(dict.fromkeys(id for id in ends if id is not None)),
    }
    return {key: value for key, value in found.items() if value is not None}


# ---- Tensors
_CHUNK = 1 << 18  # elements dequantised at a time: the scratch stays in cache


def read_rows(header: Header, key: str, part: int | None = None) -> np.ndarray:
    """Tensor `key` as stored, bytes [rows, bytes per row]; or part `part` of a stack.

    Raises NotSupported naming a format that isn't read, UserError for a file that is
    cut short.
    """
    info = header.tensors[key]
    if info.quant not in QUANTS:
        raise NotSupported(
            f"{key} is stored as {info.quant}; supported: {', '.join(QUANTS)}", "model"
        )
    per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[_kind(info)]
    width = info.shape[-1] // per_block * bytes_per_block
    rows, offset = math.prod(info.shape[:-1]), info.offset
    if part is not None:
        rows //= info.shape[0]
        offset += part * rows * width
    raw = np.fromfile(header.path, np.uint8, rows * width, offset=offset)
    if raw.size != rows * width:
        raise UserError(f"{header.path} is cut short at {key}", "model")
    return raw.reshape(rows, width)


def _kind(info: TensorInfo) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[info.quant]


class Tensors:
    """A file's tensors under Hugging Face names, dequantised as they are read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.keys: Collection[str] = header.tensors.keys()
        meta = header.metadata
        name = meta["general.architecture"]
        q = meta[f"{name}.attention.head_count"]
        k = meta.get(f"{name}.attention.head_count_kv", q)
        permuted = arch_of(meta).permuted
        self.permuted = {"q_proj": q, "k_proj": k} if permuted else {}
        kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
        self.names = gguf.get_tensor_name_map(kind, meta[f"{name}.block_count"])

    def key(self, name: str) -> str | None:
        """The file's name for weight `name`, None if the file doesn't hold it.

        The file stacks a layer's experts in one tensor.
        """
        stacked = _EXPERT.sub(".experts.", name)
        key = self.names.get_name(stacked, try_suffixes=(".weight", ".bias"))
        return key if key in self.header.tensors else None

    def read(self, name: str) -> Tensor:
        """Weight `name` as float32, query and key rows in Hugging Face's order."""
        key = self.key(name)
        assert key is not None
        info, expert = self.header.tensors[key], _EXPERT.search(name)
        raw = read_rows(self.header, key, int(expert[1]) if expert else None)
        shape = info.shape[1:] if expert else info.shape
        tensor = torch.from_numpy(_floats(raw, info)).reshape(shape)
        heads = self.permuted.get(name.split(".")[-2])
        return tensor if heads is None else _unpermute(tensor, heads)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of interleaved pairs -> rows of two halves, head by head."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _floats(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Rows of blocks -> rows of float32, to the last bit as the package does it."""
    if info.quant == "F32":
        return raw.view(np.float32)
    out = np.empty((len(raw), info.shape[-1]), np.float32)
    step = max(1, _CHUNK // info.shape[-1])
    for at in range(0, len(raw), step):
        rows, into = raw[at : at + step], out[at : at + step]
        if info.quant in _SPELLED_OUT:
            _SPELLED_OUT[info.quant](rows, into)
        else:
            into[:] = gguf.dequantize(rows, _kind(info))
    return out


# The demo model's formats: in few long steps they take a third of the time, and while
# a thread is in one of them, the others have the interpreter.
def _q4_1(raw: np.ndarray, out: np.ndarray) -> None:
    """A block is a float16 scale, a float16 minimum and 16 bytes of two numbers each:
    the low halves of all bytes are its first 16 numbers, the high halves its last."""
    blocks, halves = raw.reshape(-1, 20), out.reshape(-1, 2, 16)
    scale, low = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
    np.multiply(blocks[:, 4:] & 15, scale, out=halves[:, 0])
    np.multiply(blocks[:, 4:] >> 4, scale, out=halves[:, 1])
    halves += low[:, None]


def _q8_0(raw: np.ndarray, out: np.ndarray) -> None:
    """A block is a float16 scale and 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scale, out=out.reshape(-1, 32))


_SPELLED_OUT = {"Q4_1": _q4_1, "Q8_0": _q8_0}
