"""What a step must cost: weights, FLOPs, bytes, and the time no machine can beat.

Plain counting from a decoder's sizes and a device's datasheet; it runs no model and
knows nothing of requests, blocks or schedulers. Built in chapter 01.

FLOPs are those of matrix products and of attention, two for each multiply-add. Bytes
are the least that must cross memory: every weight once a step, every context token's
keys and values once a step. Norms, activations and sampling are left out, so all of
this is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedattn.errors import NotSupported, UserError

GIGA, TERA = 10**9, 10**12

# (new tokens, context with these included) of one request in a step.
Load = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder of the Llama kind, enough to count its weights.

    `gated`: the MLP has gate, up and down matrices, else only up and down. `tied`: the
    output head is the embedding table. `qkv_bias` as in Qwen2, `qk_norm` as in Qwen3.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}.",
                "kv_heads",
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape that a model's config.json describes.

        Raises NotSupported for a family whose weights are not counted here.
        """
        kind = config.get("model_type") or _family(config.get("architectures", ()))
        if kind not in FAMILIES or config.get("attention_bias"):
            known = ", ".join(FAMILIES)
            raise NotSupported(f"model_type {kind!r} is not counted; counted: {known}")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            **FAMILIES[kind],
        )

    # Weights, counted.
    @property
    def attention(self) -> int:
        """Weights of one layer's query, key, value and output matrices."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp(self) -> int:
        """Weights of one layer's MLP matrices."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def matrices(self) -> int:
        """Weights that every token is multiplied with: all layers, without the head."""
        return self.layers * (self.attention + self.mlp)

    @property
    def head(self) -> int:
        """Weights of the output head, and as many of the embedding table."""
        return self.vocab * self.hidden

    @property
    def vectors(self) -> int:
        """Weights of norms and biases: what is no matrix."""
        layer = 2 * self.hidden
        if self.qkv_bias:
            layer += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            layer += 2 * self.head_dim
        return self.layers * layer + self.hidden

    @property
    def weights(self) -> int:
        """All weights: what a model card calls its parameters."""
        tables = self.head if self.tied else 2 * self.head
        return self.matrices + self.vectors + tables

    # Keys and values, counted.
    def kv_bytes(self, width: int = 2) -> int:
        """Bytes that the KV cache holds for one token: a key and a value for each
        layer and KV head, in numbers of `width` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def _family(architectures: Sequence[str]) -> str | None:
    """The model type that an architecture's name begins with; GGUF files give none."""
    names = [name.removesuffix("ForCausalLM").lower() for name in architectures]
    return names[0] if names else None


FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "arcee": {"gated": False},
}


@dataclass(frozen=True, slots=True)
class Device:
    """A processor: peak FLOP/s of dense products in numbers of `width` bytes, bytes/s
    of its memory, and how many bytes that memory holds."""

    name: str
    flops: int
    bandwidth: int
    memory: int
    width: int = 2

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long."""
        return self.flops / self.bandwidth


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs, and bytes that must cross memory for them."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def bound(self, device: Device) -> str:
        """What takes longer at full speed: "arithmetic", or "memory"."""
        slow = self.flops * device.bandwidth >= self.bytes * device.flops
        return "arithmetic" if slow else "memory"

    def seconds(self, device: Device) -> float:
        """The least time on `device`: arithmetic and memory at full speed, at the same
        time, so that the slower of the two decides."""
        return max(self.flops / device.flops, self.bytes / device.bandwidth)

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: its products with weights, and its attention, which reads the
    KV cache. They run one after the other."""

    products: Cost
    attention: Cost

    @property
    def total(self) -> Cost:
        """Products and attention."""
        return self.products + self.attention

    def seconds(self, device: Device) -> float:
        """The least time on `device`, part by part."""
        return self.products.seconds(device) + self.attention.seconds(device)

    def together(self, other: Step) -> Step:
        """Both in one step of the same model: the weights are read once."""
        flops = self.products.flops + other.products.flops
        read = max(self.products.bytes, other.products.bytes)
        return Step(Cost(flops, read), self.attention + other.attention)


def step(shape: Shape, loads: Iterable[Load], width: int = 2) -> Step:
    """What one forward pass over some requests costs, each (new tokens, context).

    The last token of each request goes through the output head. The token at position
    p reads p + 1 keys and values; keys and values cross memory once for all of a
    request's new tokens. Raises UserError for a context shorter than its new tokens.
    """
    loads = list(loads)
    for new, context in loads:
        if not 1 <= new <= context:
            raise UserError(f"new={new} tokens do not fit context={context}.", "new")
    tokens = sum(new for new, _ in loads)
    reads = sum(new * (context - new) + new * (new + 1) // 2 for new, context in loads)
    return Step(
        products=Cost(
            flops=2 * (tokens * shape.matrices + len(loads) * shape.head),
            bytes=width * (shape.matrices + shape.vectors + shape.head),
        ),
        attention=Cost(
            flops=4 * shape.layers * shape.heads * shape.head_dim * reads,
            bytes=shape.kv_bytes(width) * sum(context for _, context in loads),
        ),
    )


def decode(shape: Shape, batch: int, context: int, width: int = 2) -> Step:
    """One token for each of `batch` requests, each with that context."""
    return step(shape, [(1, context)] * batch, width)


def prefill(shape: Shape, tokens: int, width: int = 2) -> Step:
    """One whole prompt in one step."""
    return step(shape, [(tokens, tokens)], width)


def generation(
    shape: Shape, prompt: int, answer: int, cached: bool = True, width: int = 2
) -> list[Step]:
    """The steps of one request alone, a sampled token each: with a KV cache, or with
    everything computed again each time."""
    contexts = range(prompt + 1, prompt + answer)
    later = [step(shape, [(1 if cached else c, c)], width) for c in contexts]
    return [prefill(shape, prompt, width), *later]


# What a device makes of a shape.
def knee(shape: Shape, device: Device) -> int:
    """The smallest batch of decodes whose products are bound by arithmetic.

    The weights take w / bandwidth however many requests share them, a request's FLOPs f
    take f / FLOP/s: the first n with n f / FLOP/s >= w / bandwidth.
    """
    one = decode(shape, 1, 1, device.width).products
    return -(-one.bytes * device.flops // (one.flops * device.bandwidth))


def concurrency(
    shape: Shape, device: Device, context: int, share: float = 0.9
) -> int | None:
    """Requests of that context whose keys and values fit beside the weights in
    `share` of the memory; None if the weights alone do not fit."""
    room = int(share * device.memory) - device.width * shape.weights
    return room // (shape.kv_bytes(device.width) * context) if room >= 0 else None


# Sizes from each model's published config.json.
SHAPES: Mapping[str, Shape] = {
    "SmolLM2-135M": Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
    "Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True),
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "Llama-2-7B": Shape(32, 4096, 32, 32, 128, 11008, 32000),
    "Mistral-7B": Shape(32, 4096, 32, 8, 128, 14336, 32000),
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "Llama-3-8B": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "Llama-2-13B": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "Llama-3-70B": Shape(80, 8192, 64, 8, 128, 28672, 128256),
}

# Peak bfloat16 products without sparsity, as the vendors' datasheets state it (many
# print twice as much, "with sparsity"), and memory as it is sold.
DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        # NVIDIA A100 datasheet: 312 TFLOPS, 2,039 GB/s.
        Device("A100 80GB SXM", 312 * TERA, 2039 * GIGA, 80 * GIGA),
        # NVIDIA H100 datasheet: 1,979 TFLOPS with sparsity; 989.4 in the white paper.
        Device("H100 SXM", 989_400 * GIGA, 3350 * GIGA, 80 * GIGA),
        # NVIDIA H200 datasheet: the H100's arithmetic, 4.8 TB/s, 141 GB.
        Device("H200 SXM", 989_400 * GIGA, 4800 * GIGA, 141 * GIGA),
        # NVIDIA DGX B200 datasheet, an eighth of it: 36 PFLOPS with sparsity,
        # 64 TB/s, 1,440 GB.
        Device("B200", 2250 * TERA, 8000 * GIGA, 180 * GIGA),
        # AMD Instinct MI300X datasheet: 1,307.4 TFLOPS, 5.3 TB/s, 192 GB.
        Device("MI300X", 1_307_400 * GIGA, 5300 * GIGA, 192 * GIGA),
        # NVIDIA L40S datasheet: 362.05 TFLOPS, 864 GB/s, 48 GB.
        Device("L40S", 362_050 * GIGA, 864 * GIGA, 48 * GIGA),
        # NVIDIA L4 datasheet: 242 TFLOPS with sparsity, 300 GB/s, 24 GB.
        Device("L4", 121 * TERA, 300 * GIGA, 24 * GIGA),
        # NVIDIA Ada white paper: 165.2 TFLOPS, sums in float32; 1,008 GB/s.
        Device("RTX 4090", 165_200 * GIGA, 1008 * GIGA, 24 * GIGA),
        # Measured, not promised: float32 on the two Zen 3 cores of book/measured.
        Device("2 CPU cores", 150 * GIGA, 22 * GIGA, 24 * GIGA, width=4),
    )
}
