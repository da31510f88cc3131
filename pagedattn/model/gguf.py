"""GGUF files: metadata, configuration in Hugging Face's terms, dequantised tensors.

Knows the container's layout and each architecture's keys; block formats and tensor
names are the `gguf` package's. Reads plainly instead of mapping, so a file costs no
memory once its tensors are packed. Knows nothing of decoders. Built in chapter 05.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
HARMLESS = ("rope_freqs.weight",)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; `shape` is row-major, the reverse of the file's order."""

    shape: tuple[int, ...]
    quant: str
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the data: metadata as plain Python, tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The file's metadata under its own keys, as str, int, float, bool and lists."""
    return read_header(path).metadata


def read_header(path: str | Path) -> Header:
    """Metadata and tensor directory.

    Raises UserError for what is no GGUF file or is cut short, NotSupported for a file
    that is one part of several.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file", "model")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Cursor(data, 4).header()
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

    def header(self) -> Header:
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
        return Header(metadata, moved)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
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
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.number(_SCALARS[code])

    def array(self, code: int, count: int) -> list[Any]:
        if code == _STRING:
            return self.strings(count)
        if code == _ARRAY:
            return [self.value(code) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[code]}")
        found = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return list(found)

    def tensor(self) -> tuple[str, TensorInfo]:
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
}


@dataclass(frozen=True, slots=True)
class Arch:
    """How a GGUF architecture maps to a family.

    `fields` come from the file as `_COMMON`'s do, `fixed` are what the format leaves
    unsaid; `permuted` where query and key rows are stored for interleaved rotation.
    """

    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    permuted: bool = False


ARCHS: Mapping[str, Arch] = {
    "llama": Arch("LlamaForCausalLM", {}, {}, permuted=True),
    "qwen2": Arch("Qwen2ForCausalLM", {}, {}),
    "qwen3": Arch("Qwen3ForCausalLM", {}, {}),
    "gemma3": Arch(
        "Gemma3ForCausalLM",
        {
            "sliding_window": "attention.sliding_window",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        {},
    ),
}


def config(header: Header) -> dict[str, Any]:
    """The file's configuration in config.json's terms.

    Raises NotSupported naming an architecture or rope scaling that isn't built.
    """
    meta = header.metadata
    name = meta.get("general.architecture")
    if name not in ARCHS:
        raise NotSupported(
            f"GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHS)}",
            "model",
        )
    arch = ARCHS[name]
    fields = {**_COMMON, **arch.fields}
    found = {field: meta.get(f"{name}.{key}") for field, key in fields.items()}
    return {
        "architectures": [arch.architecture],
        **arch.fixed,
        **{field: value for field, value in found.items() if value is not None},
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        **_rope(meta, name),
    }


def _rope(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind = meta.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind != "linear":
        raise NotSupported(f"GGUF rope scaling {kind!r} is not supported", "model")
    factor = meta[f"{name}.rope.scaling.factor"]
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


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


class Tensors:
    """A file's tensors under Hugging Face names, dequantised as they are read."""

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = path
        self.infos = header.tensors
        self.keys: Collection[str] = header.tensors.keys()
        name = header.metadata["general.architecture"]
        self.permuted = ARCHS[name].permuted
        self.heads = {
            "q_proj": header.metadata[f"{name}.attention.head_count"],
            "k_proj": header.metadata[f"{name}.attention.head_count_kv"],
        }
        kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
        blocks = header.metadata[f"{name}.block_count"]
        self.names = gguf.get_tensor_name_map(kind, blocks)
        self.pool = ThreadPoolExecutor(torch.get_num_threads())

    def key(self, name: str) -> str | None:
        """The file's name for weight `name`, None if the file doesn't hold it."""
        key = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        return key if key in self.infos else None

    def read(self, name: str) -> Tensor:
        """Weight `name` as float32, query and key rows in Hugging Face's order."""
        key = self.key(name)
        assert key is not None
        tensor = torch.from_numpy(self._dequantised(key))
        heads = self.heads.get(name.split(".")[-2]) if self.permuted else None
        return tensor if heads is None else _unpermute(tensor, heads)

    def _dequantised(self, key: str) -> np.ndarray:
        info = self.infos[key]
        if info.quant not in QUANTS:
            raise NotSupported(
                f"{key} is stored as {info.quant}; supported: {', '.join(QUANTS)}",
                "model",
            )
        kind = gguf.GGMLQuantizationType[info.quant]
        per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        width = info.shape[-1] // per_block * bytes_per_block
        rows = int(np.prod(info.shape[:-1]))
        raw = np.fromfile(self.path, np.uint8, rows * width, offset=info.offset)
        if raw.size != rows * width:
            raise UserError(f"{self.path} is cut short at {key}", "model")
        if info.quant == "F32":
            return raw.view(np.float32).reshape(info.shape)
        return self._dequantise(raw.reshape(rows, width), kind).reshape(info.shape)


    def _dequantise(
        self, raw: np.ndarray, kind: gguf.GGMLQuantizationType
    ) -> np.ndarray:
        """Rows of blocks -> rows of float32, in threads: numpy releases the GIL."""
        per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((len(raw), raw.shape[1] // bytes_per_block * per_block), "f4")
        step = max(1, _CHUNK // out.shape[1])

        def part(start: int) -> None:
            out[start : start + step] = gguf.dequantize(raw[start : start + step], kind)

        list(self.pool.map(part, range(0, len(raw), step)))
        return out


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of interleaved pairs -> rows of two halves, head by head."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
