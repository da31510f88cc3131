"""The counts of bench.costs against models that exist: their parameters on the meta
device, their FLOPs as torch counts them, the KV tensors that the kernels allocate."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedattn.kernels import spec as kernels
from torch.utils.flop_counter import FlopCounterMode

from pagedattn.bench.costs import (
    DEVICES,
    FAMILIES,
    SHAPES,
    Cost,
    Device,
    Load,
    Shape,
    Step,
    concurrency,
    decode,
    generation,
    knee,
    prefill,
    step,
)
from pagedattn.errors import NotSupported, UserError
from pagedattn.model.loader import load_config
from pagedattn.model.source import resolve

# What the models' cards state, in full.
PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-2-7B": 6_738_415_616,
    "Mistral-7B": 7_241_732_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3-70B": 70_553_706_496,
}
LLAMA2, LLAMA3 = SHAPES["Llama-2-7B"], SHAPES["Llama-3-8B"]
H100 = DEVICES["H100 SXM"]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    return Shape(
        layers=draw(st.integers(1, 3)),
        hidden=heads * draw(st.integers(3, 6)),  # Llama's configuration wants that
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 16])),
        intermediate=draw(st.sampled_from([16, 48])),
        vocab=draw(st.integers(1, 99)),
        tied=draw(st.booleans()),
        **draw(st.sampled_from(list(FAMILIES.values()))),
    )


@st.composite
def load(draw: st.DrawFn) -> Load:
    context = draw(st.integers(1, 3000))
    return draw(st.integers(1, context)), context


loads = st.lists(load(), min_size=1, max_size=5)
devices = st.sampled_from(list(DEVICES.values()))
published = st.sampled_from(list(SHAPES.values()))


def family(shape: Shape) -> str:
    """The model type whose weights have this shape's flags."""
    flags = {"qkv_bias", "qk_norm", "gated"}
    named = {flag: getattr(shape, flag) for flag in flags}
    plain = dict(qkv_bias=False, qk_norm=False, gated=True)
    return next(k for k, given in FAMILIES.items() if plain | given == named)


def config(shape: Shape) -> Any:
    """transformers' configuration of this shape."""
    return transformers.AutoConfig.for_model(
        family(shape),
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        pad_token_id=None,
        attn_implementation="eager",
    )


def model(shape: Shape, device: str) -> Any:
    """transformers' model of this shape: on "meta" it takes no memory."""
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config(shape))


# Weights.
@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_the_published_count(name: str) -> None:
    assert SHAPES[name].weights == PUBLISHED[name]


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_of_the_model(name: str) -> None:
    assert model(SHAPES[name], "meta").num_parameters() == SHAPES[name].weights


@given(shapes())
@settings(max_examples=20)
def test_weights_of_any_shape_are_those_of_the_model(shape: Shape) -> None:
    parameters = dict(model(shape, "meta").named_parameters())
    matrices = [p.numel() for n, p in parameters.items() if n.endswith("proj.weight")]
    vectors = [p.numel() for p in parameters.values() if p.dim() == 1]
    assert sum(p.numel() for p in parameters.values()) == shape.weights
    assert sum(matrices) == shape.matrices
    assert sum(vectors) == shape.vectors


@given(shapes())
@settings(max_examples=25)
def test_a_shape_is_read_from_its_config(shape: Shape) -> None:
    assert Shape.of(config(shape).to_dict()) == shape


def test_the_demo_model_is_in_the_table() -> None:
    assert Shape.of(load_config(resolve())) == SHAPES["SmolLM2-135M"]


def test_old_configs_leave_fields_out() -> None:
    old = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    assert Shape.of(old) == LLAMA2


@pytest.mark.parametrize("config", [{"model_type": "mixtral"}, {}])
def test_unknown_family_is_refused(config: dict[str, str]) -> None:
    with pytest.raises(NotSupported, match="qwen3"):
        Shape.of(config)


def test_biased_attention_is_refused() -> None:
    with pytest.raises(NotSupported):
        Shape.of({"model_type": "llama", "attention_bias": True})


def test_kv_heads_must_divide_heads() -> None:
    with pytest.raises(UserError, match="kv_heads=3 does not divide heads=4"):
        Shape(1, 8, 4, 3, 2, 8, 8)


# Keys and values.
@given(shapes(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 4))
@settings(max_examples=25)
def test_kv_bytes_are_what_the_kernels_allocate(
    shape: Shape, dtype: torch.dtype, blocks: int
) -> None:
    size = (blocks, shape.kv_heads, 4, shape.head_dim)
    caches = [kernels.empty_kv(*size, dtype) for _ in range(shape.layers)]
    held = sum(k.nbytes + v.nbytes for k, v in caches)
    assert shape.kv_bytes(dtype.itemsize) * 4 * blocks == held


def test_kv_bytes_by_hand() -> None:
    assert LLAMA2.kv_bytes() == 2 * 32 * 4096 * 2 == 512 * 1024
    assert LLAMA3.kv_bytes() == LLAMA2.kv_bytes() // 4
    # "The KV cache of a single token demands 800 KB" (OPT-13B; Kwon et al., 2023).
    opt = Shape(40, 5120, 40, 40, 128, 20480, 50272, tied=True, gated=False)
    assert opt.kv_bytes() == 800 * 1024


# FLOPs. transformers 5.24 calls the argument `cache`, earlier ones past_key_values.
OLD_NAME = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


def counted(shape: Shape, new: int, context: int) -> int:
    """The FLOPs of one request's forward pass, as torch counts them."""
    net = model(shape, "cpu").eval()
    ids = torch.zeros(1, context, dtype=torch.long)
    with torch.no_grad():
        cache = transformers.DynamicCache()
        if context > new:
            net(ids[:, : context - new], past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            net(ids[:, context - new :], past_key_values=cache, logits_to_keep=1)
    # Some versions of transformers make the angles of their rotation by a product.
    parts = counter.get_flop_counts().items()
    angles = sum(sum(v.values()) for k, v in parts if k.endswith("model.rotary_emb"))
    return counter.get_total_flops() - angles


@OLD_NAME
@given(shapes(), st.integers(1, 20))
@settings(max_examples=10)
def test_flops_of_a_decode_are_those_torch_counts(shape: Shape, context: int) -> None:
    assert decode(shape, 1, context).total.flops == counted(shape, 1, context)


@OLD_NAME
@given(shapes(), st.integers(1, 9), st.integers(0, 9))
@settings(max_examples=10)
def test_flops_of_a_chunk_are_those_torch_counts(
    shape: Shape, new: int, before: int
) -> None:
    """torch multiplies all new tokens with the whole context, and masks afterwards."""
    one = step(shape, [(new, before + new)])
    masked = 4 * shape.layers * shape.heads * shape.head_dim * new * (new - 1) // 2
    assert one.total.flops + masked == counted(shape, new, before + new)


def test_a_step_by_hand() -> None:
    # 2 layers; 4 query heads of 8 numbers on 2 KV heads; hidden 16, MLP 32, 10 words.
    shape = Shape(2, 16, 4, 2, 8, 32, 10)
    attention = 16 * 32 + 2 * 16 * 16 + 32 * 16
    matrices = 2 * (attention + 3 * 16 * 32)
    assert (shape.attention, shape.matrices) == (attention, matrices)
    assert shape.vectors == 2 * 2 * 16 + 16
    one = step(shape, [(3, 5), (1, 7)])
    reads = (3 + 4 + 5) + 7  # keys that each of the four tokens meets
    assert one.products.flops == 2 * (4 * matrices + 2 * 16 * 10)
    assert one.attention.flops == 2 * 2 * 2 * 4 * 8 * reads  # scores and sums
    assert one.products.bytes == 2 * (matrices + 5 * 16 + 16 * 10)
    assert one.attention.bytes == 2 * (2 * 2 * 2 * 8) * (5 + 7)


@given(published, loads, loads)
def test_requests_add_up_and_weights_are_read_once(
    shape: Shape, a: list[Load], b: list[Load]
) -> None:
    alone, other, both = step(shape, a), step(shape, b), step(shape, a + b)
    assert alone.together(other) == other.together(alone) == both
    assert both.attention == alone.attention + other.attention
    assert both.products.flops == alone.products.flops + other.products.flops
    assert both.products.bytes == alone.products.bytes == other.products.bytes


@given(published, st.lists(st.integers(1, 500), min_size=1, max_size=5))
def test_chunks_cost_the_same_arithmetic_and_more_bytes(
    shape: Shape, sizes: list[int]
) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chunks = [step(shape, [(n, end)]) for n, end in zip(sizes, ends, strict=True)]
    whole, later = prefill(shape, ends[-1]), len(sizes) - 1
    attention = sum(c.attention.flops for c in chunks)
    products = sum(c.products.flops for c in chunks) - 2 * later * shape.head
    assert (attention, products) == (whole.attention.flops, whole.products.flops)
    assert sum(c.products.bytes for c in chunks) == whole.products.bytes * len(sizes)
    read = sum(c.attention.bytes for c in chunks) - whole.attention.bytes
    assert read == shape.kv_bytes() * sum(ends[:-1])


@given(published, load(), devices)
def test_more_work_costs_more(shape: Shape, one: Load, device: Device) -> None:
    new, context = one
    base = step(shape, [one], device.width)
    longer = step(shape, [(new, context + 1)], device.width)
    more = step(shape, [(new + 1, context + 1)], device.width)
    wider = step(shape, [one, one], device.width)
    for other in (longer, more, wider):
        assert other.attention.flops > base.attention.flops
        assert other.attention.bytes > base.attention.bytes
        assert other.products.flops >= base.products.flops
        assert other.seconds(device) > base.seconds(device)


@given(published, st.integers(1, 300), st.integers(1, 9000), st.sampled_from([1, 2, 4]))
def test_attention_of_a_decode_never_changes_its_intensity(
    shape: Shape, batch: int, context: int, width: int
) -> None:
    attention = decode(shape, batch, context, width).attention
    group = shape.heads // shape.kv_heads
    assert attention.flops * width == 2 * group * attention.bytes


@pytest.mark.parametrize("bad", [(0, 5), (6, 5), (-1, 5)])
def test_new_tokens_must_fit_their_context(bad: Load) -> None:
    with pytest.raises(UserError, match=f"new={bad[0]} tokens do not fit context=5"):
        step(LLAMA2, [bad])


# Generation.
@given(published, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40)
def test_a_cache_computes_each_position_once(
    shape: Shape, prompt: int, answer: int
) -> None:
    cached = generation(shape, prompt, answer)
    naive = generation(shape, prompt, answer, cached=False)
    assert len(cached) == len(naive) == answer
    assert cached[0] == naive[0] == prefill(shape, prompt)
    head = 2 * answer * shape.head
    tokens = _products(cached) - head, _products(naive) - head
    once, again = prompt + answer - 1, sum(range(prompt, prompt + answer))
    assert tokens == (2 * shape.matrices * once, 2 * shape.matrices * again)


def _products(steps: list[Step]) -> int:
    return sum(s.products.flops for s in steps)


# Devices.
def test_ridges_by_hand() -> None:
    ridges = {name: round(d.ridge) for name, d in DEVICES.items()}
    assert ridges["A100 80GB SXM"] == 153  # 312 / 2.039
    assert ridges["H100 SXM"] == 295  # 989.4 / 3.35
    assert ridges["H200 SXM"] == 206  # 989.4 / 4.8
    assert ridges["2 CPU cores"] == 7  # 150 / 22


@given(st.integers(1, 10**15), st.integers(1, 10**15), devices)
def test_the_slower_side_decides(flops: int, size: int, device: Device) -> None:
    cost = Cost(flops, size)
    arithmetic, memory = flops / device.flops, size / device.bandwidth
    assert cost.seconds(device) == max(arithmetic, memory)
    bound = {"arithmetic": arithmetic, "memory": memory}[cost.bound(device)]
    assert bound == pytest.approx(cost.seconds(device))
    if cost.intensity > 1.001 * device.ridge:
        assert cost.bound(device) == "arithmetic"
    if cost.intensity < 0.999 * device.ridge:
        assert cost.bound(device) == "memory"


def test_a_step_takes_its_parts_one_after_the_other() -> None:
    one = decode(LLAMA2, 32, 1000)
    assert one.products.bound(H100) == one.attention.bound(H100) == "memory"
    assert one.seconds(H100) == pytest.approx(one.total.bytes / 3.35e12)
    large = decode(LLAMA2, 512, 1000)
    assert large.products.bound(H100) == "arithmetic"
    apart = large.products.flops / 989.4e12 + large.attention.bytes / 3.35e12
    assert large.seconds(H100) == pytest.approx(apart)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_knee_is_where_arithmetic_takes_over(shape: str, device: str) -> None:
    one, chip = SHAPES[shape], DEVICES[device]
    n = knee(one, chip)
    assert decode(one, n, 1, chip.width).products.bound(chip) == "arithmetic"
    assert n == 1 or decode(one, n - 1, 1, chip.width).products.bound(chip) == "memory"
    # The textbook's rule: FLOP/s over bytes/s, for each two bytes of a weight.
    assert n == pytest.approx(chip.ridge * chip.width / 2, abs=1.5)


@given(published, devices, st.integers(1, 100_000), st.floats(0.1, 1.0))
def test_concurrency_is_the_most_that_fits(
    shape: Shape, device: Device, context: int, share: float
) -> None:
    n = concurrency(shape, device, context, share)
    free = share * device.memory - device.width * shape.weights
    each = context * shape.kv_bytes(device.width)
    if n is None:
        assert free < 1
    else:
        assert n * each <= free + 1 and (n + 1) * each > free - 1


def test_concurrency_by_hand() -> None:
    # (72 GB - 13.48 GB) / (4,096 x 0.5 MiB), and with a quarter of the KV heads.
    assert concurrency(LLAMA2, H100, 4096) == 27
    assert concurrency(LLAMA3, H100, 4096) == 104
    assert concurrency(SHAPES["Llama-3-70B"], H100, 4096) is None


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys, pagedattn.bench.costs\n"
        "print({'torch', 'numba', 'numpy', 'transformers'} & set(sys.modules))"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True)
    assert done.stdout.decode().strip() == "set()"
