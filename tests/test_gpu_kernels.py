"""The Triton kernels under Triton's interpreter, against the specification.

conftest turns the interpreter on before Triton is imported: it runs a kernel's source
on CPU tensors, one program after the other. Unused slots and outputs hold NaN, so that
what is read or left unwritten by mistake shows. Every configuration is drawn, not only
the first. Float16 answers to the specification in float32, from the same numbers.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagedattn.kernels import spec
from test_families import CASES
from test_kernels import (
    PENALTIES,
    Case,
    Problem,
    attend,
    attend_shared,
    build,
    cascade,
    decode,
    experts,
    logits_of,
    penalties,
    sample_rows,
    sampling_cases,
    seen_tokens,
    share,
)
from tiny import CONTEXT, Paged, prompt, reference, reference_logits, saved
from torch import Tensor

from pagedattn.model import loader
from pagedattn.request import SamplingParams

pytest.importorskip("triton", reason="Triton is for Linux")

from pagedattn.kernels import gpu  # noqa: E402
from pagedattn.kernels.gpu import launch as gpu_launch  # noqa: E402
from pagedattn.kernels.gpu.launch import Config, Tuned, launch  # noqa: E402
from triton import OutOfResources  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

FOLDER = Path(__file__).parents[1] / "kernels" / "gpu"
DTYPES = torch.float32, torch.float16
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=2e-5),
    torch.float16: dict(rtol=4e-3, atol=4e-3),
}
dtypes = st.sampled_from(DTYPES)


def configured(name: str, number: int) -> Callable[..., None]:
    """A kernel in one of its listed configurations."""
    function = getattr(gpu, name)
    if not isinstance(function, Tuned):
        return function
    return partial(function.body, function.configs[number % len(function.configs)])


def module(number: int) -> SimpleNamespace:
    """All kernels, each in one of its configurations."""
    names = (name for name in vars(spec) if callable(getattr(gpu, name, None)))
    return SimpleNamespace(**{name: configured(name, number) for name in names})


kernels = st.integers(0, 3).map(module)


@st.composite
def cases(draw: st.DrawFn, decode: bool = False) -> Case:
    block_size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 16, 32, 64]))
    near = st.integers(1, 4).flatmap(
        lambda blocks: st.integers(-1, 1).map(lambda off: blocks * block_size + off)
    )
    length = st.one_of(near, st.integers(1, 70), st.sampled_from([255, 256, 257, 513]))
    length = length.map(lambda n: max(1, n))
    lengths = draw(st.lists(length, min_size=1, max_size=3))
    new = [1 if decode else draw(st.integers(0, min(n, 40))) for n in lengths]
    return Case(
        tuple(lengths),
        tuple(new),
        block_size,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])),
        dim=draw(st.sampled_from([32, 40, 64, 96, 128, 256])),
        window=draw(st.sampled_from([0, 0, 1, 2, 16, 63, 300])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def rounded(problem: Problem, dtype: torch.dtype) -> tuple[Problem, Problem]:
    """The problem in a dtype, and the same numbers in float32."""
    names = "q", "k_cache", "v_cache"
    given = replace(problem, **{n: getattr(problem, n).to(dtype) for n in names})
    return given, replace(given, **{n: getattr(given, n).float() for n in names})


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, **CLOSE[actual.dtype])


# ------------------------------------------------------------------------- attention


@given(cases(decode=True), kernels, dtypes)
@example(Case((1500, 3), (1, 1), 16, 1, 3, 64, 0, 0.0, 1), module(0), torch.float32)
@example(Case((1500, 700), (1, 1), 16, 2, 2, 32, 600, 0.0, 2), module(0), torch.float16)
@settings(max_examples=40)
def test_decode(case: Case, kernels: Any, dtype: torch.dtype) -> None:
    problem, exact = rounded(build(case), dtype)
    assert_close(decode(kernels, problem), decode(spec, exact))


@given(cases(), kernels, dtypes)
@settings(max_examples=40)
def test_prefill(case: Case, kernels: Any, dtype: torch.dtype) -> None:
    problem, exact = rounded(build(case), dtype)
    assert_close(attend(kernels, problem), attend(spec, exact))


@given(cases(), kernels, dtypes, st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=20)
def test_cascade(
    case: Case, kernels: Any, dtype: torch.dtype, blocks: int, seqs: int
) -> None:
    case, shared = cascade(case, blocks, seqs)
    problem = build(case)
    share(problem, shared // case.block_size)
    problem, exact = rounded(problem, dtype)
    expected = attend_shared(spec, exact, shared)
    assert_close(attend_shared(kernels, problem, shared), expected)


@pytest.mark.parametrize("number", range(4))
def test_a_tile_of_queries_meets_every_edge(number: int) -> None:
    """A prompt longer than a tile, whose middle needs no mask, and with a window."""
    for window in (0, 100):
        case = Case((300, 5, 70), (290, 0, 70), 16, 1, 2, 32, window, 0.0, 4)
        problem = build(case)
        assert_close(attend(module(number), problem), attend(spec, problem))


def test_large_scores_stay_finite() -> None:
    """Chunks whose maxima differ by hundreds: the merge must not overflow."""
    problem = build(Case((1024,), (1,), 16, 1, 1, 32, 0, 0.0, 5))
    problem.k_cache.mul_(200)
    expected = decode(spec, problem)
    assert expected.isfinite().all()
    # A score of 700 is rounded to 6e-5, and so is the weight's relative error.
    for found in (
        decode(gpu, problem),
        attend(gpu, problem),
        attend_shared(gpu, problem, 512),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_decode_ignores_its_neighbours() -> None:
    """Bit for bit: a sequence's result is the same alone and in a batch."""
    problem = build(Case((700, 33, 257), (1, 1, 1), 16, 2, 3, 64, 0, 0.0, 7))
    together = decode(gpu, problem)
    for s, length in enumerate(problem.lengths.tolist()):
        alone = replace(
            problem,
            q=problem.q[s : s + 1],
            tables=problem.tables[s : s + 1, : -(-length // 16)].contiguous(),
            lengths=problem.lengths[s : s + 1],
        )
        assert torch.equal(decode(gpu, alone)[0], together[s])


def test_empty_batch() -> None:
    problem = build(Case((5,), (5,), 4, 1, 1, 32, 0, 0.0, 3))
    none = replace(
        problem,
        q=problem.q[:0],
        tables=problem.tables[:0],
        starts=problem.starts[:1],
        lengths=problem.lengths[:0],
    )
    assert decode(gpu, none).shape == attend(gpu, none).shape == (0, 1, 32)


# ------------------------------------------------------------------ cache and rotary


@given(
    rows=st.sampled_from([0, 1, 2, 9]),
    heads=st.sampled_from([(9, 3), (1, 1), (20, 10)]),
    dims=st.sampled_from([(64, 64), (64, 32), (40, 40), (48, 12), (256, 256)]),
    block_size=st.sampled_from([1, 5, 16]),
    dtype=dtypes,
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_rotary_and_writes(
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """rotary, write_kv, and both at once: in the fused matrix, and not beside it."""
    (h, kvh), (dim, rotary_dim) = heads, dims
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, (h + 2 * kvh) * dim + 8, generator=make).to(dtype)
    positions = torch.randint(0, 50, (rows,), generator=make)
    cos_sin = torch.randn(50, rotary_dim, generator=make)
    blocks = rows // block_size + 2
    slots = torch.randperm(blocks * block_size, generator=make)[:rows]

    def run(kernels: Any, dtype: torch.dtype, name: str) -> list[Tensor]:
        copy = fused.to(dtype, copy=True)
        q, k, v = copy[:, 8:].view(rows, h + 2 * kvh, dim).split([h, kvh, kvh], dim=1)
        caches = torch.full((2, blocks, kvh, block_size, dim), 7.0, dtype=dtype)
        if name == "rotary":
            kernels.rotary(q, k, positions, cos_sin)
        elif name == "write_kv":
            kernels.write_kv(k, v, *caches, slots)
        else:
            kernels.rotary_write(q, k, v, positions, cos_sin, *caches, slots)
        return [copy, *caches]

    for name in ("rotary", "write_kv", "rotary_write"):
        found, expected = run(gpu, dtype, name), run(spec, torch.float32, name)
        for actual, right in zip(found, expected, strict=True):
            assert_close(actual, right)


@given(st.integers(0, 4), st.sampled_from([4, 64, 1500]), st.integers(0, 99))
@settings(max_examples=10)
def test_copy_blocks(copies: int, dim: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, 9, 2, 3, dim, generator=make)
    sources, targets = torch.randperm(9, generator=make)[: 2 * copies].view(2, -1)
    expected = caches.clone()
    spec.copy_blocks(*expected, sources, targets)
    gpu.copy_blocks(*caches, sources, targets)
    assert torch.equal(caches, expected)


# -------------------------------------------------------------- norms and activations

ROWS = st.sampled_from([0, 1, 2, 5, 33])


@given(ROWS, st.sampled_from([1, 7, 64, 576, 3000]), dtypes, st.integers(0, 99))
@settings(max_examples=25)
def test_norms(rows: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, dim, generator=make).to(dtype)
    weight = torch.randn(dim, generator=make).to(dtype)
    expected, out = torch.empty(rows, dim), torch.full((rows, dim), torch.nan).to(dtype)
    spec.rms_norm(expected, x.float(), weight.float(), 1e-5)
    gpu.rms_norm(out, x, weight, 1e-5)
    assert_close(out, expected)
    total = residual + x
    spec.rms_norm(expected, total.float(), weight.float(), 1e-5)
    gpu.add_rms_norm(out.fill_(torch.nan), residual, x, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, expected)


@given(ROWS, st.integers(1, 4), dtypes, st.integers(0, 99))
@settings(max_examples=10)
def test_norm_of_heads_in_place(
    rows: int, heads: int, dtype: torch.dtype, seed: int
) -> None:
    """As Qwen3 norms its queries: every head by itself, in the fused matrix."""
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, heads * 16 + 8, generator=make).to(dtype)
    weight, copy = torch.randn(16, generator=make).to(dtype), fused.float()
    for kernels, matrix in ((spec, copy), (gpu, fused)):
        view = matrix[:, 8:].view(rows, heads, 16)
        kernels.rms_norm(view, view, weight.to(matrix.dtype), 1e-6)
    assert_close(fused, copy)


@given(
    ROWS,
    st.sampled_from([1, 9, 96, 2500]),
    st.sampled_from([1, 30]),
    kernels,
    dtypes,
    st.sampled_from(["silu_mul", "gelu_tanh_mul"]),
)
@settings(max_examples=25)
def test_activations(
    rows: int, width: int, spread: int, kernels: Any, dtype: torch.dtype, name: str
) -> None:
    make = torch.Generator().manual_seed(rows + width)
    gate_up = (torch.randn(rows, 2 * width, generator=make) * spread).to(dtype)
    gate_up[:1, :1] = -100.0
    out = torch.full((rows, width), torch.nan).to(dtype)
    expected = torch.empty(rows, width, dtype=torch.float64)
    getattr(spec, name)(expected, gate_up.double())
    getattr(kernels, name)(out, gate_up)
    assert_close(out, expected.float())


# ------------------------------------------------ mixtures of experts, and sampling


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4),
    st.sampled_from([(7, 5), (130, 70), (32, 128)]),
    kernels,
    dtypes,
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_grouped_linear(
    sizes: list[int],
    shape: tuple[int, int],
    kernels: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x, weights, tokens, starts = experts(sizes, 40, *shape, seed)
    x, weights = x.to(dtype), weights.to(dtype)
    out = torch.full((sum(sizes), shape[0]), torch.nan).to(dtype)
    expected = torch.empty(out.shape)
    spec.grouped_linear(expected, x.float(), weights.float(), tokens, starts)
    kernels.grouped_linear(out, x, weights, tokens, starts)
    torch.testing.assert_close(out.float(), expected, rtol=4e-3, atol=2e-2)


@given(
    st.lists(sampling_cases(vocab=1100), min_size=1, max_size=3),
    kernels,
    st.integers(0, 999),
)
@settings(max_examples=12)
def test_sample(
    rows: list[tuple[SamplingParams, float]], kernels: Any, seed: int
) -> None:
    logits = logits_of(len(rows), 1100, seed)  # two blocks, or one
    expected = sample_rows(spec, logits, rows)
    assert sample_rows(kernels, logits, rows) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_of_no_numbers_says_so(temperature: float) -> None:
    """NaN, infinity, or all blocked, in the first block or the last: that row is -1."""
    logits = torch.zeros(5, 1100)
    logits[0, 3], logits[1, 1099], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 1030], logits[4, 7] = 90.0, -torch.inf
    logits[4, 1031] = 90.0
    out, ones = torch.zeros(5, dtype=torch.int64), torch.ones(5)
    top_k, top_p = torch.zeros(5).int(), ones.double() * 0.9
    args = ones * temperature, top_k, top_p, ones * 0, ones.double() / 2
    gpu.sample(out, logits, *args)
    assert out.tolist() == [-1, -1, -1, 1030, 1031]


@given(st.lists(PENALTIES, min_size=1, max_size=6), st.integers(0, 999))
@settings(max_examples=15)
def test_penalize(rows: list[tuple[float, float, float]], seed: int) -> None:
    logits, seen = logits_of(len(rows), 900, seed), seen_tokens(len(rows), 900, seed)
    expected = logits.clone()
    spec.penalize(expected, *seen, *penalties(rows))
    gpu.penalize(logits, *seen, *penalties(rows))
    assert torch.equal(logits, expected)


# ------------------------------------------------------------------------ the package


@pytest.mark.parametrize(
    "name", ["gemma2", "qwen3", "mixtral", "qwen2 moe", "qwen3 moe"]
)
def test_a_decoder_computes_with_them(name: str, tmp_path: Path) -> None:
    """In place of the CPU's kernels, whose packed products alone are not here."""
    this = CASES[name]
    model = reference(this.architecture, **this.changes)
    both = SimpleNamespace(**vars(spec) | vars(gpu))
    ours = loader.load(saved(model, tmp_path), both, CONTEXT)
    ids = prompt(21)
    found = Paged(ours).logits(ids, [12, 1, 4])
    torch.testing.assert_close(found, reference_logits(model, ids), atol=1e-4, rtol=0)


def test_same_signatures() -> None:
    """What is here has its specification's arguments, by name and in order."""
    found = {name: f for name, f in vars(gpu).items() if callable(f)}
    assert {"decode_attention", "rotary_write", "sample"} <= found.keys()
    for name, function in found.items():
        tuned = isinstance(function, Tuned)
        parameters = [*inspect.signature(function).parameters][tuned:]
        assert parameters == [*inspect.signature(getattr(spec, name)).parameters]


def jitted() -> list[tuple[str, ast.FunctionDef]]:
    """(source, definition) of every Triton function."""
    trees = [(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.py"))]
    return [
        (text, node)
        for text in trees
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]


def test_kernels_have_few_parameters_and_their_pointers_a_shape() -> None:
    functions = [f for f in vars(spec).values() if inspect.isfunction(f)]
    tensors = {
        parameter.name
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation is Tensor
    }
    several = {"cache", "parts", "filters"}  # tuples of pointers
    for text, node in jitted():
        assert len(node.args.args) <= 14, node.name
        for arg in node.args.args:
            line = text.splitlines()[arg.lineno - 1].strip()
            if line.startswith(f"{arg.arg},") and arg.arg in tensors | several:
                assert "[" in line, f"{node.name}: {arg.arg}"


def test_without_a_gpu_the_first_configuration_is_taken() -> None:
    problem = build(Case((5,), (1,), 4, 1, 1, 32, 0, 0.0, 3))
    args = problem.q, problem.q, problem.k_cache
    assert gpu.decode_attention.choose(*args) is gpu.decode_attention.configs[0]


def test_a_choice_is_measured_once_and_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that is not there: the fastest that fits, and none while recording."""
    times = {16: 3.0, 32: 2.0, 64: None, 128: 2.5}  # None: does not fit
    measured = []

    def body(config: Config, x: Any) -> None:
        if times[config.sizes["ROWS"]] is None:
            raise OutOfResources(2, 1, "shared memory")

    def do_bench(run: Callable[[], None], **_: Any) -> float:
        run()
        measured.append(list(times.values())[len(measured) + (len(measured) > 1)])
        return measured[-1]

    function = Tuned(tuple(Config(dict(ROWS=n)) for n in times), lambda x: (1,), body)
    card = SimpleNamespace(is_cuda=True, device=0)
    recording = [True]
    monkeypatch.setattr(gpu_launch, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(gpu_launch, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "No Card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", recording.pop)
    assert function.choose(card) is function.configs[0] and not measured
    recording.append(False)
    assert function.choose(card) is function.configs[1]
    assert function.choose(card) is function.configs[1] and len(measured) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["No-Card.json"]
    assert gpu_launch.Choices(tmp_path / "No-Card.json").known == {"body 1": 1}


def test_an_empty_grid_starts_nothing() -> None:
    launch(None, (0, 3), Config())


def test_configurations_read_as_words() -> None:
    config = Config(dict(ROWS=64), warps=8, stages=3)
    assert str(config) == "ROWS 64, 8 warps, 3 stages"
