"""What differs between model families, as data: one table entry each.

Knows every supported architecture's configuration fields and weight names, and turns
a configuration into one frozen `DecoderConfig` that the decoder and the loader obey.
Knows nothing of tensors, files or kernels. Chapter 01 counts its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedattn.errors import NotSupported, UserError
from pagedattn.model.rope import Rope, read_rope

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse MLP: `top_k` of `count` experts, each `size` wide, per token.

    `normalise` rescales the chosen weights to sum 1; `shared_size` is the width of
    the expert that every token also visits, or None.
    """

    count: int
    top_k: int
    size: int
    normalise: bool
    shared_size: int | None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer's own traits: window (0 reads everything), rope, sparse or dense."""

    window: int
    rope: Rope | None
    sparse: bool


@dataclass(frozen=True, slots=True)
class Names:
    """How a family's checkpoint names its weights, below `model.layers.N.`.

    `norms` stand before and after attention, before and after the MLP; None where a
    family has no norm. `qkv` and `gate_up` have one name where the file fuses them.
    `root` stands before every name, and weights under `ignored` belong to other
    parts than the language model.
    """

    norms: tuple[str | None, str | None, str | None, str | None]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    sparse: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    root: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the decoder needs to know of a model, whatever its family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int
    eps: float
    activation: str
    layers: tuple[LayerConfig, ...]
    experts: Experts | None
    attention_scale: float
    softcap: float
    logit_softcap: float
    embed_scale: float
    residual_scale: float
    logit_scale: float
    norm_offset: float
    qk_norm: str | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    names: Names


# ---- Rules: how a field's value follows from a configuration, where it isn't one field
Rule = Callable[[Config, int], bool]


def _no_layer(config: Config, layer: int) -> bool:
    return False


def _every_layer(config: Config, layer: int) -> bool:
    return True


def _layer_types(config: Config, layer: int) -> bool | None:
    types = config.get("layer_types")
    return None if types is None else types[layer] == "sliding_attention"


def _every_layer_if_used(config: Config, layer: int) -> bool:
    return bool(config["use_sliding_window"])


def _late_layers(config: Config, layer: int) -> bool:
    """Qwen 2 and 3: the first `max_window_layers` read everything."""
    return bool(config["use_sliding_window"]) and layer >= config["max_window_layers"]


def _early_even_layers(config: Config, layer: int) -> bool:
    """Qwen2-MoE's rule, as transformers 5 has it."""
    early = layer < config["max_window_layers"] and layer % 2 == 0
    return bool(config["use_sliding_window"]) and early


def _without_rope(config: Config, layer: int) -> bool:
    """SmolLM3: windows, if used at all, go to the layers without rotary embedding."""
    return bool(config["use_sliding_window"]) and not _has_rope(config, layer)


def _all_but_each_nth(config: Config, layer: int) -> bool:
    """Gemma: the last layer of each group of `sliding_window_pattern` is global."""
    pattern = config.get("sliding_window_pattern") or config["_sliding_window_pattern"]
    return (layer + 1) % pattern != 0


def _has_rope(config: Config, layer: int) -> bool:
    given = config.get("no_rope_layers")
    if given is not None:
        return bool(given[layer])
    return (layer + 1) % config["no_rope_layer_interval"] != 0


def _sparse_steps(config: Config, layer: int) -> bool:
    """Qwen-MoE: each `decoder_sparse_step`-th layer, but never a named dense one."""
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


@dataclass(frozen=True, slots=True)
class Family:
    """One table entry. A string where a value is due names the configuration field.

    `defaults` are the values that the family's configuration class supplies for
    fields a file leaves out. `refused` lists fields that change the computation in
    ways not built here: any true value stops the load. `section` holds the language
    model's part of a larger model's configuration.
    """

    model_type: str
    names: Names
    defaults: Config = field(default_factory=dict)
    slides: Rule = _no_layer
    reads_layer_types: bool = False
    has_rope: Rule = _every_layer
    local_rope: bool = False
    sparse: Rule = _no_layer
    expert_size: str = "moe_intermediate_size"
    normalise: bool | str = True
    shared_size: str | None = None
    activation: str = "hidden_act"
    attention_scale: str | None = None
    query_scalar: str | None = None
    softcap: str | None = None
    logit_softcap: str | None = None
    embed_scale: str | None = None
    embed_by_root: bool = False
    residual_scale: str | None = None
    logit_divisor: str | None = None
    norm_offset: float = 0.0
    qk_norm: str | None = None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    scaled_len: bool = False
    section: str | None = None
    refused: tuple[str, ...] = ()


PRE = ("input_layernorm", None, "post_attention_layernorm", None)
POST = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_SMALL_THETA = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_LLAMA = _SMALL_THETA | {
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_MISTRAL = _LLAMA | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN = _LLAMA | {
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = _QWEN | {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_GEMMA = _SMALL_THETA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

_GEMMA3 = Family(
    "gemma3_text",
    Names(BOTH),
    defaults=_GEMMA
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "_sliding_window_pattern": 6,
    },
    slides=_all_but_each_nth,
    reads_layer_types=True,
    local_rope=True,
    scaled_len=True,
    activation="hidden_activation",
    query_scalar="query_pre_attn_scalar",
    logit_softcap="final_logit_softcapping",
    embed_by_root=True,
    norm_offset=1.0,
    qk_norm="head",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    refused=("use_bidirectional_attention", "attn_logit_softcapping"),
)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        Names(PRE),
        defaults=_LLAMA,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(
        "mistral",
        Names(PRE),
        defaults=_MISTRAL,
        slides=_every_layer,
        refused=("layer_types",),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        Names(PRE),
        defaults=_QWEN,
        slides=_late_layers,
        reads_layer_types=True,
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        Names(PRE),
        defaults=_QWEN | {"head_dim": 128},
        slides=_late_layers,
        reads_layer_types=True,
        qk_norm="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        Names(PRE),
        defaults=_QWEN
        | {
            "vocab_size": 128_256,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        slides=_without_rope,
        reads_layer_types=True,
        has_rope=_has_rope,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        Names(BOTH),
        defaults=_GEMMA
        | {
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "_sliding_window_pattern": 2,
        },
        slides=_all_but_each_nth,
        reads_layer_types=True,
        activation="hidden_activation",
        query_scalar="query_pre_attn_scalar",
        softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
        embed_by_root=True,
        norm_offset=1.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        refused=("use_bidirectional_attention",),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    # Served as the language model it contains: text in, text out.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        model_type="gemma3",
        names=Names(
            BOTH,
            root="language_model.",
            ignored=("vision_tower.", "multi_modal_projector."),
        ),
        section="text_config",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        Names(PRE, qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",)),
        defaults=_LLAMA
        | {
            "vocab_size": 32_064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        slides=_every_layer,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        Names(POST),
        defaults=_LLAMA | {"vocab_size": 50_304, "rms_norm_eps": 1e-5},
        qk_norm="whole",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
    ),
    "GraniteForCausalLM": Family(
        "granite",
        Names(PRE),
        defaults=_LLAMA
        | {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        attention_scale="attention_multiplier",
        embed_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        Names(PRE, sparse="block_sparse_moe", expert=("w1", "w3", "w2")),
        defaults=_MISTRAL
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        slides=_every_layer,
        sparse=_every_layer,
        expert_size="intermediate_size",
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        Names(PRE),
        defaults=_QWEN_MOE
        | {
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        slides=_early_even_layers,
        reads_layer_types=True,
        sparse=_sparse_steps,
        normalise="norm_topk_prob",
        shared_size="shared_expert_intermediate_size",
        qkv_bias="qkv_bias",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        Names(PRE),
        defaults=_QWEN_MOE
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        slides=_every_layer_if_used,
        sparse=_sparse_steps,
        normalise="norm_topk_prob",
        qk_norm="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
    ),
}
SUPPORTED = ", ".join(FAMILIES)


def decoder_config(config: Config) -> DecoderConfig:
    """What `config` (a config.json as a dict) asks of the decoder.

    Raises NotSupported naming the architecture or feature and what is supported, and
    UserError for a missing field.
    """
    architecture, family = _family(config)
    given = {**config, **(config[family.section] if family.section else {})}
    given = {_OTHER_NAMES.get(k, k): v for k, v in given.items() if v is not None}
    config = {**family.defaults, **given}
    _refuse(architecture, family, config)
    try:
        return _decoder_config(architecture, family, config)
    except KeyError as error:
        raise UserError(
            f"the model's configuration lacks {error} for {architecture}", "model"
        ) from error


# Fields that files spell in two ways.
_OTHER_NAMES: Mapping[str, str] = {"num_local_experts": "num_experts"}


def _family(config: Config) -> tuple[str, Family]:
    for name in config.get("architectures") or ():
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not config.get("architectures"):
        for name, family in FAMILIES.items():
            if family.model_type == config.get("model_type"):
                return name, family
    named = config.get("architectures") or [config.get("model_type")]
    raise NotSupported(
        f"architecture {named[0]!r} is not supported; supported: {SUPPORTED}", "model"
    )


def _refuse(architecture: str, family: Family, config: Config) -> None:
    """Stop on what would silently compute something else than the checkpoint means."""
    if quant := config.get("quantization_config"):
        method = quant.get("quant_method", "of unknown method")
        raise NotSupported(
            f"quantization_config ({method}) is not supported; supported: safetensors "
            "in F32, F16, BF16, and GGUF files",
            "model",
        )
    for name in family.refused:
        if config.get(name):
            raise NotSupported(f"{architecture} with {name} is not supported", "model")


# transformers' names for the two activations that have kernels.
_ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _activation(family: Family, config: Config) -> str:
    name = config[family.activation]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise NotSupported(
            f"{family.activation} {name!r} is not supported; supported: {known}",
            "model",
        )
    return _ACTIVATIONS[name]


def _decoder_config(architecture: str, family: Family, config: Config) -> DecoderConfig:
    def number(name: str | None, otherwise: float) -> float:
        return float(otherwise if name is None else config.get(name) or otherwise)

    def flag(rule: bool | str) -> bool:
        return bool(config[rule]) if isinstance(rule, str) else rule

    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    hidden_size = config["hidden_size"]
    layers = _layers(family, config, head_dim)
    scalar = number(family.query_scalar, head_dim)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_model_len=_max_model_len(family, config, layers),
        eps=config["rms_norm_eps"],
        activation=_activation(family, config),
        layers=layers,
        experts=_experts(family, config, flag(family.normalise)),
        attention_scale=number(family.attention_scale, scalar**-0.5),
        softcap=number(family.softcap, 0.0),
        logit_softcap=number(family.logit_softcap, 0.0),
        embed_scale=hidden_size**0.5
        if family.embed_by_root
        else number(family.embed_scale, 1.0),
        residual_scale=number(family.residual_scale, 1.0),
        logit_scale=1.0 / number(family.logit_divisor, 1.0),
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        tied=config["tie_word_embeddings"],
        names=family.names,
    )


def _layers(family: Family, config: Config, head_dim: int) -> tuple[LayerConfig, ...]:
    ropes = {sliding: _rope(family, config, head_dim, sliding) for sliding in (0, 1)}

    def layer(i: int) -> LayerConfig:
        slides = _slides(family, config, i)
        window = config.get("sliding_window") or 0
        used = config.get("use_sliding_window", True)
        return LayerConfig(
            window=window if slides and used else 0,
            rope=ropes[slides] if family.has_rope(config, i) else None,
            sparse=family.sparse(config, i),
        )

    return tuple(layer(i) for i in range(config["num_hidden_layers"]))


def _slides(family: Family, config: Config, layer: int) -> bool:
    given = _layer_types(config, layer) if family.reads_layer_types else None
    return family.slides(config, layer) if given is None else given


def _rope(family: Family, config: Config, head_dim: int, sliding: int) -> Rope:
    """The rope of a sliding or a full layer; one and the same but in Gemma 3.

    Three spellings meet here: `rope_parameters` per layer type, `rope_parameters` for
    all layers (transformers 5), and `rope_scaling` with `rope_theta` before that.
    """
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config["rope_theta"]
    if family.local_rope:
        kind = "sliding_attention" if sliding else "full_attention"
        nested = "full_attention" in params or "sliding_attention" in params
        scaling = params.get(kind) if nested else None if sliding else params
        params = dict(scaling or {})
        theta = config["rope_local_base_freq"] if sliding else theta
    elif any(isinstance(value, Mapping) for value in params.values()):
        raise NotSupported("rope_parameters per layer type are not supported", "model")
    params.setdefault("rope_theta", theta)
    params.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    return read_rope(
        params,
        head_dim,
        config["max_position_embeddings"],
        config.get("original_max_position_embeddings"),
    )


def _max_model_len(
    family: Family, config: Config, layers: tuple[LayerConfig, ...]
) -> int:
    """The checkpoint's context, after scaling where the file states it before.

    As vLLM has it: linear, dynamic and YaRN multiply; Llama 3, LongRoPE and Gemma 3
    files already state the scaled length.
    """
    rope = next((layer.rope for layer in layers if layer.rope), None)
    stated = config["max_position_embeddings"]
    if rope is None or family.scaled_len:
        return stated
    if rope.kind == "yarn":
        return max(stated, int(rope.trained_len * rope.stretch()))
    if rope.kind in ("linear", "dynamic"):
        return int(stated * rope.stretch())
    return stated


def _experts(family: Family, config: Config, normalise: bool) -> Experts | None:
    if family.sparse is _no_layer:
        return None
    shared = family.shared_size
    return Experts(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        size=config[family.expert_size],
        normalise=normalise,
        shared_size=config[shared] if shared else None,
    )
