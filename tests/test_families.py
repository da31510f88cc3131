"""Every native family against transformers, and every feature against its absence.

One tiny seeded model each: logits at every position, 32 greedy tokens, in one piece
and in chunks, through shuffled blocks. Then each feature is switched off with the
weights unchanged, and the logits must move: what can't fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagedattn.kernels import spec as kernels
from tiny import (
    CONTEXT,
    SIZES,
    VOCAB,
    Paged,
    Request,
    config,
    load,
    prompt,
    redrawn,
    reference,
    reference_logits,
    saved,
)
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from pagedattn.errors import NotSupported, UserError
from pagedattn.model import loader
from pagedattn.model.families import FAMILIES, SUPPORTED, DecoderConfig, decoder_config
from pagedattn.model.source import Source

WINDOW = 8
Change = Callable[[DecoderConfig], DecoderConfig]


@dataclass(frozen=True)
class Case:
    """A model: its architecture and what its configuration changes."""

    architecture: str
    changes: dict[str, Any]


def case(architecture: str, **changes: Any) -> Case:
    return Case(architecture, changes)


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **params}


LONG = dict(short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.5, 2.5, 5.0, 9.0])
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)

CASES = {
    "llama2": case("LlamaForCausalLM", num_key_value_heads=4),
    "llama3": case(
        "LlamaForCausalLM",
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama linear": case(
        "LlamaForCausalLM", rope_parameters=rope("linear", factor=4.0)
    ),
    "llama yarn": case(
        "LlamaForCausalLM",
        head_dim=32,
        rope_parameters=rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=4.0
        ),
    ),
    "llama yarn mscale": case(
        "LlamaForCausalLM",
        head_dim=32,
        rope_parameters=rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=4.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "llama longrope": case(
        "LlamaForCausalLM",
        rope_parameters=rope("longrope", original_max_position_embeddings=16, **LONG),
    ),
    "llama dynamic": case(
        "LlamaForCausalLM", rope_parameters=rope("dynamic", factor=2.0)
    ),
    "llama biases": case(
        "LlamaForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "smollm2": case("LlamaForCausalLM", tie_word_embeddings=True),
    "mistral": case("MistralForCausalLM", sliding_window=WINDOW, head_dim=16),
    "qwen2": case("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2 window": case(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3": case("Qwen3ForCausalLM", head_dim=16, attention_bias=True),
    "smollm3": case(
        "SmolLM3ForCausalLM",
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "gemma2": case(
        "Gemma2ForCausalLM",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": case(
        "Gemma3ForCausalLM",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": rope("linear", factor=4.0) | {"rope_theta": 1e6},
            "sliding_attention": rope("default"),
        },
    ),
    "phi3": case(
        "Phi3ForCausalLM",
        sliding_window=24,
        rope_parameters=rope("default", partial_rotary_factor=0.5),
    ),
    "phi3 longrope": case(
        "Phi3ForCausalLM",
        original_max_position_embeddings=16,
        rope_parameters=rope("longrope", **LONG),
    ),
    "olmo2": case("Olmo2ForCausalLM", attention_bias=True),
    "granite": case(
        "GraniteForCausalLM",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=0.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "mixtral": case(
        "MixtralForCausalLM", num_local_experts=5, num_experts_per_tok=2, head_dim=8
    ),
    "qwen2 moe": case(
        "Qwen2MoeForCausalLM",
        **MOE,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3 moe": case(
        "Qwen3MoeForCausalLM",
        **MOE,
        head_dim=16,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Any, Source]]:
    """A case's transformers model and its folder, made once."""
    kept: dict[str, tuple[Any, Source]] = {}

    def make(name: str) -> tuple[Any, Source]:
        if name not in kept:
            this = CASES[name]
            model = reference(this.architecture, **this.changes)
            kept[name] = model, saved(model, tmp_path_factory.mktemp("tiny"))
        return kept[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_transformers(name: str, made: Any) -> None:
    """40 prompt tokens, longer than each window and trained context, then 32 greedy.

    Checked by teacher forcing: if each of our tokens is the reference's choice after
    the ones before it, the reference would have made the same 32.
    """
    theirs, source = made(name)
    ours = load(source, CONTEXT)
    ids = prompt(40)
    ids += Paged(ours).greedy(ids, 32)
    expected = reference_logits(theirs, ids)
    assert expected.std() >= 1
    assert ids[40:] == expected[39:-1].argmax(-1).tolist()
    for chunks in ([len(ids)], [7, 1, 16, 3]):
        got = Paged(ours).logits(ids, chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama2", "gemma3", "qwen2 moe"])
def test_neighbours_in_a_batch_change_nothing(name: str, made: Any) -> None:
    """Three requests, some decoding beside one in prefill, each as if alone."""
    theirs, source = made(name)
    ours = load(source, CONTEXT)
    requests = [Request(prompt(n, seed=n)) for n in (9, 30, 23)]
    paged = Paged(ours, requests=3)
    found: list[list[torch.Tensor]] = [[], [], []]
    for takes in ([8, 10, 1], [1, 1, 21], [0, 19, 1]):
        busy = [i for i in range(3) if takes[i]]
        some = [requests[i] for i in busy]
        logits = paged_step(paged, requests, some, [takes[i] for i in busy])
        for i, piece in zip(busy, logits, strict=True):
            found[i].append(piece)
    for request, pieces in zip(requests, found, strict=True):
        expected = reference_logits(theirs, request.ids)
        torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=0)


def paged_step(
    paged: Paged, everyone: list[Request], some: list[Request], takes: list[int]
) -> list[torch.Tensor]:
    """One step of `some`, each with the table row it has among `everyone`."""
    whole = paged.tables
    paged.tables = whole[:, [everyone.index(request) for request in some]]
    found = paged.step(some, takes)
    paged.tables = whole
    return found


# ---- Each feature moves the logits: one is switched off after parsing, weights kept.
def off(**fields: Any) -> Change:
    return lambda c: replace(c, **fields)


def layers(**fields: Any) -> Change:
    return lambda c: replace(c, layers=tuple(replace(x, **fields) for x in c.layers))


def ropes(**fields: Any) -> Change:
    def change(c: DecoderConfig) -> DecoderConfig:
        new = (x if x.rope is None else replace(x.rope, **fields) for x in c.layers)
        pairs = zip(c.layers, new, strict=True)
        return replace(c, layers=tuple(replace(x, rope=r) for x, r in pairs))

    return change


def experts(**fields: Any) -> Change:
    return lambda c: replace(c, experts=replace(c.experts, **fields))


def rope_everywhere(c: DecoderConfig) -> DecoderConfig:
    return layers(rope=next(x.rope for x in c.layers if x.rope))(c)


def global_rope_everywhere(c: DecoderConfig) -> DecoderConfig:
    return layers(rope=next(x.rope for x in c.layers if not x.window))(c)


def no_norm(place: int) -> Change:
    def change(c: DecoderConfig) -> DecoderConfig:
        norms = list(c.names.norms)
        norms[place] = None
        return replace(c, names=replace(c.names, norms=tuple(norms)))

    return change


PLAIN = ropes(kind="default")
SWITCHES: list[tuple[str, str, Change]] = [
    ("llama3", "rope scaling", PLAIN),
    ("llama linear", "rope scaling", PLAIN),
    ("llama yarn", "rope scaling", PLAIN),
    ("llama yarn", "attention factor", ropes(attention_factor=1.0)),
    ("llama yarn", "ramp", ropes(beta_slow=0.25)),
    ("llama yarn mscale", "mscale", ropes(mscale=None)),
    ("llama yarn mscale", "truncate", ropes(truncate=True)),
    ("llama longrope", "rope scaling", PLAIN),
    ("llama longrope", "attention factor", ropes(attention_factor=1.0)),
    ("llama longrope", "long factors", ropes(trained_len=CONTEXT)),
    ("llama biases", "qkv bias", off(qkv_bias=False)),
    ("llama biases", "output bias", off(o_bias=False)),
    ("llama biases", "MLP bias", off(mlp_bias=False)),
    ("mistral", "window", layers(window=0)),
    ("mistral", "window by one", layers(window=WINDOW + 1)),
    ("qwen2", "qkv bias", off(qkv_bias=False)),
    ("qwen2 window", "window", layers(window=0)),
    ("qwen2 window", "first layers read everything", layers(window=WINDOW)),
    ("qwen3", "head norm", off(qk_norm=None)),
    ("qwen3", "output bias", off(o_bias=False)),
    ("smollm3", "no-rope layer", rope_everywhere),
    ("smollm3", "window", layers(window=0)),
    ("gemma2", "score cap", off(softcap=0.0)),
    ("gemma2", "logit cap", off(logit_softcap=0.0)),
    ("gemma2", "norm offset", off(norm_offset=0.0)),
    ("gemma2", "window", layers(window=0)),
    ("gemma2", "global layers", layers(window=WINDOW)),
    ("gemma2", "embedding scale", off(embed_scale=1.0)),
    ("gemma2", "score scale", off(attention_scale=16**-0.5)),
    ("gemma2", "activation", off(activation="silu")),
    ("gemma2", "norm after attention", no_norm(1)),
    ("gemma2", "norm after MLP", no_norm(3)),
    ("gemma3", "local rope", global_rope_everywhere),
    ("gemma3", "rope scaling", PLAIN),
    ("gemma3", "head norm", off(qk_norm=None)),
    ("gemma3", "window", layers(window=0)),
    ("gemma3", "norm offset", off(norm_offset=0.0)),
    ("phi3", "partial rotary", ropes(dim=8)),
    ("phi3", "window", layers(window=0)),
    ("phi3 longrope", "rope scaling", PLAIN),
    ("olmo2", "projection norm", off(qk_norm=None)),
    ("olmo2", "norm after attention", no_norm(1)),
    ("granite", "embedding multiplier", off(embed_scale=1.0)),
    ("granite", "residual multiplier", off(residual_scale=1.0)),
    ("granite", "attention multiplier", off(attention_scale=8**-0.5)),
    ("granite", "logits scaling", off(logit_scale=1.0)),
    ("mixtral", "normalised routing", experts(normalise=False)),
    ("mixtral", "second expert", experts(top_k=1)),
    ("qwen2 moe", "raw routing", experts(normalise=True)),
    ("qwen2 moe", "shared expert", experts(shared_size=None)),
    ("qwen2 moe", "second expert", experts(top_k=1)),
    ("qwen3 moe", "normalised routing", experts(normalise=False)),
    ("qwen3 moe", "second expert", experts(top_k=1)),
]


@pytest.mark.parametrize(
    "name, feature, change", SWITCHES, ids=[f"{n}: {f}" for n, f, _ in SWITCHES]
)
def test_each_feature_moves_the_logits(
    name: str, feature: str, change: Change, made: Any
) -> None:
    _, source = made(name)
    parsed, reader = loader.open_checkpoint(source)
    assert change(parsed) != parsed
    logits = []
    for c in (parsed, change(parsed)):
        model = loader.build(c, loader.Weights(reader), kernels, CONTEXT)
        logits.append(Paged(model).logits(prompt(40), [40]))
    assert (logits[0] - logits[1]).abs().max() > 1e-2


# ---- Scalings that depend on length are fixed at load
@pytest.mark.parametrize("length", [24, 48, 72])
def test_dynamic_scaling_is_fixed_by_max_model_len(length: int, tmp_path: Path) -> None:
    """Past the trained 32, transformers picks frequencies by the length it sees.

    A forward pass of exactly `max_model_len` tokens uses the ones we fixed; ours use
    them from the first token on, whatever the chunks.
    """
    changes = dict(
        max_position_embeddings=32, rope_parameters=rope("dynamic", factor=2.0)
    )
    theirs = reference("LlamaForCausalLM", **changes)
    ours = load(saved(theirs, tmp_path), max_model_len=length)
    ids = prompt(length)
    expected = reference_logits(theirs, ids)
    for chunks in ([length], [5, 11]):
        got = Paged(ours).logits(ids, chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama longrope", "phi3 longrope"])
def test_longrope_keeps_its_short_factors_within_the_trained_context(
    name: str, made: Any
) -> None:
    theirs, source = made(name)
    ids = prompt(16)
    expected = reference_logits(theirs, ids)
    short = Paged(load(source, max_model_len=16)).logits(ids, [5])
    long = Paged(load(source, max_model_len=17)).logits(ids, [5])
    torch.testing.assert_close(short, expected, atol=1e-4, rtol=0)
    assert (long - expected).abs().max() > 1e-2


# ---- C113: windows, at every length around them
@pytest.mark.parametrize("length", [5, 7, 8, 9, 12, 16, 17, 40])
def test_mistral_window_of_8_at_each_length(length: int, made: Any) -> None:
    theirs, source = made("mistral")
    ours = load(source, CONTEXT)
    ids = prompt(length)
    expected = reference_logits(theirs, ids)
    for chunks in ([length], [3], [8], [1]):
        got = Paged(ours).logits(ids, chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_use_sliding_window_false_wins_over_a_window(tmp_path: Path) -> None:
    changes = dict(sliding_window=4, use_sliding_window=False, max_window_layers=0)
    theirs = reference("Qwen2ForCausalLM", **changes)
    source = saved(theirs, tmp_path)
    raw = loader.load_config(source) | {"sliding_window": 4}
    assert [x.window for x in decoder_config(raw).layers] == [0, 0, 0]
    got = Paged(load(source)).logits(prompt(20), [20])
    expected = reference_logits(theirs, prompt(20))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "architecture, changes, windows",
    [
        ("Qwen2ForCausalLM", dict(max_window_layers=2), [0, 0, 8, 8]),
        ("Qwen3ForCausalLM", dict(max_window_layers=1), [0, 8, 8, 8]),
        (
            "Qwen2ForCausalLM",
            dict(layer_types=["full_attention", "sliding_attention"] * 2),
            [0, 8, 0, 8],
        ),
        ("Qwen2MoeForCausalLM", dict(max_window_layers=3), [8, 0, 8, 0]),
        ("Qwen3MoeForCausalLM", {}, [8, 8, 8, 8]),
        ("SmolLM3ForCausalLM", dict(no_rope_layer_interval=2), [0, 8, 0, 8]),
        ("Gemma2ForCausalLM", {}, [8, 0, 8, 0]),
        ("Gemma3ForCausalLM", dict(sliding_window_pattern=3), [8, 8, 0, 8]),
        ("MixtralForCausalLM", {}, [8, 8, 8, 8]),
        ("LlamaForCausalLM", {}, [0, 0, 0, 0]),
    ],
)
def test_which_layers_slide(
    architecture: str, changes: dict[str, Any], windows: list[int]
) -> None:
    """From the rules of the file, and from the layer types that transformers writes."""
    raw = {
        "architectures": [architecture],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "use_sliding_window": True,
        **changes,
    }
    assert [x.window for x in decoder_config(raw).layers] == windows
    written = config(architecture, **(raw | {"num_hidden_layers": 4})).to_dict()
    assert [x.window for x in decoder_config(written).layers] == windows


# ---- Configurations
# The larger model is checked by itself: its configuration has sections.
WHOLE = "Gemma3ForConditionalGeneration"
TEXT = [name for name in FAMILIES if name != WHOLE]


@pytest.mark.parametrize("architecture", TEXT)
def test_defaults_are_transformers(architecture: str) -> None:
    """What a file leaves out means what the family's own class says it means."""
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    full = config(architecture, **sizes)
    kind = type(full)
    whole = kind(**sizes).to_dict() | {"architectures": [architecture]}
    sparse = sizes | {"architectures": [architecture]}
    assert decoder_config(sparse) == decoder_config(whole)


@pytest.mark.parametrize("architecture", TEXT)
def test_model_type_stands_in_for_a_missing_architecture(architecture: str) -> None:
    raw = config(architecture).to_dict()
    named = decoder_config(raw)
    raw["architectures"] = None
    assert decoder_config(raw) == named


def test_old_and_new_rope_spellings_agree() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": rope("linear", factor=2.0) | {"rope_theta": 5e5}}
    raw = config("LlamaForCausalLM").to_dict()
    del raw["rope_parameters"]
    assert decoder_config(raw | old) == decoder_config(raw | new)


def test_old_and_new_spellings_of_gemma3s_two_ropes_agree() -> None:
    old = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    new = {
        "rope_parameters": {
            "full_attention": rope("linear", factor=8.0) | {"rope_theta": 2e6},
            "sliding_attention": rope("default") | {"rope_theta": 2e4},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    raw = config("Gemma3ForCausalLM").to_dict()
    del raw["rope_parameters"], raw["layer_types"]
    assert decoder_config(raw | old) == decoder_config(raw | new)


@pytest.mark.parametrize(
    "scaling, length",
    [
        (rope("default"), 256),
        (rope("linear", factor=4.0), 1024),
        (rope("dynamic", factor=2.0), 512),
        (rope("yarn", factor=4.0, original_max_position_embeddings=256), 1024),
        (rope("yarn", factor=4.0, original_max_position_embeddings=64), 256),
        (CASES["llama3"].changes["rope_parameters"], 256),
    ],
)
def test_longest_context_after_scaling(scaling: dict[str, Any], length: int) -> None:
    raw = config("LlamaForCausalLM").to_dict() | {"rope_parameters": scaling}
    assert decoder_config(raw).max_model_len == length


def test_early_phi3_files_mean_longrope() -> None:
    raw = config("Phi3ForCausalLM", **CASES["phi3 longrope"].changes).to_dict()
    expected = decoder_config(raw)
    for kind in ("su", "yarn"):
        old = {**raw["rope_parameters"], "type": kind, "rope_type": kind}
        assert decoder_config(raw | {"rope_parameters": old}) == expected


def test_the_language_model_inside_gemma_3_with_vision(tmp_path: Path) -> None:
    """Its own section of the configuration, its own weights; the tower is left out."""
    torch.manual_seed(0)
    settings = Gemma3Config(
        text_config=SIZES | CASES["gemma3"].changes,
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        image_token_index=150,
    )
    settings._attn_implementation = "eager"
    theirs = redrawn(Gemma3ForConditionalGeneration(settings), WHOLE)
    ours = load(saved(theirs, tmp_path), CONTEXT)
    ids = [token for token in prompt(40) if token != 150]
    expected = reference_logits(theirs, ids)
    got = Paged(ours).logits(ids, [7, 1, 16])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", SUPPORTED]),
        ({"architectures": None, "model_type": "mpt"}, ["mpt", SUPPORTED]),
        ({"rope_parameters": rope("mrope")}, ["mrope", "yarn"]),
        ({"rope_parameters": {"full_attention": rope("linear")}}, ["per layer type"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq", "GGUF"]),
        ({"hidden_act": "relu2"}, ["relu2", "silu"]),
    ],
)
def test_what_is_not_built_stops_with_its_name_and_what_is(
    change: dict[str, Any], says: list[str]
) -> None:
    raw = config("LlamaForCausalLM").to_dict() | change
    with pytest.raises(NotSupported) as error:
        decoder_config(raw)
    assert all(part in str(error.value) for part in says)


@pytest.mark.parametrize(
    "architecture, field, value",
    [
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
        ("MistralForCausalLM", "layer_types", ["full_attention"]),
    ],
)
def test_fields_that_change_the_computation_are_never_ignored(
    architecture: str, field: str, value: Any
) -> None:
    raw = config(architecture).to_dict() | {field: value}
    with pytest.raises(NotSupported, match=field):
        decoder_config(raw)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match="hidden_size"):
        decoder_config(
            {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
        )


def test_a_vocabulary_larger_than_the_prompts_is_served_whole(made: Any) -> None:
    _, source = made("llama2")
    assert Paged(load(source)).logits(prompt(3), [3]).shape == (3, VOCAB)
