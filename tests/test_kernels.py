"""The kernels: the specification against formulas written anew, numba against it.

Unused slots and the null block hold NaN throughout, so that a kernel which reads what
it must not read gives NaN instead of a number that is only a little wrong.
"""

import ast
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagedattn.kernels import cpu, spec
from torch import Tensor

from pagedattn.request import SamplingParams
from pagedattn.sampling.filters import survivors
from pagedattn.sampling.penalties import discourage, penalize
from pagedattn.sampling.sampler import pick

ROOT = Path(__file__).parent.parent
CLOSE = dict(rtol=1e-4, atol=2e-5)
BOTH = pytest.mark.parametrize("kernels", [spec, cpu], ids=["spec", "cpu"])


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem; `new` tokens of each sequence are this plan's."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    block_size: int
    kv_heads: int
    group: int
    dim: int
    window: int
    softcap: float
    seed: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A Case as tensors, beside the plain keys and values of every sequence."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    tail: tuple[float, int, float]


@st.composite
def cases(draw: st.DrawFn, decode: bool = False) -> Case:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 16, 16, 32, 64, 256]))
    near = st.integers(1, 5).flatmap(
        lambda blocks: st.integers(-1, 1).map(
            lambda off: min(max(1, blocks * block_size + off), 600)
        )
    )
    length = st.one_of(near, st.integers(1, 80), st.sampled_from([255, 256, 257, 513]))
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    new = [1 if decode else draw(st.integers(1, n)) for n in lengths]
    return Case(
        tuple(lengths),
        tuple(new),
        block_size,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])),
        dim=draw(st.sampled_from([1, 3, 8, 12, 16, 20, 32, 40, 64])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 16, 63, 300])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def build(case: Case) -> Problem:
    """Random contents in permuted blocks; NaN wherever no kernel may look."""
    make = torch.Generator().manual_seed(case.seed)
    size, dim, window = case.block_size, case.dim, case.window
    blocks = [-(-n // size) for n in case.lengths]
    total = sum(blocks)
    k_cache, v_cache = spec.empty_kv(total + 3, case.kv_heads, size, dim, torch.float32)
    k_cache.fill_(torch.nan)
    v_cache.fill_(torch.nan)
    order = (torch.randperm(total + 2, generator=make) + 1).int().tolist()
    tables = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    keys, values = [], []
    for s, (length, n) in enumerate(zip(case.lengths, case.new, strict=True)):
        tables[s, : blocks[s]] = torch.tensor([order.pop() for _ in range(blocks[s])])
        k = torch.randn(length, case.kv_heads, dim, generator=make) * 2
        v = torch.randn(length, case.kv_heads, dim, generator=make)
        slots = [int(tables[s, t // size]) * size + t % size for t in range(length)]
        spec.write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
        if window:  # blocks wholly behind the first query's window are null
            first = max(0, length - n - window + 1)
            tables[s, : first // size] = 0
        keys.append(k)
        values.append(v)
    heads = case.kv_heads * case.group
    fused = torch.randn(sum(case.new), heads * dim + 8, generator=make)
    q = fused[:, : heads * dim].view(-1, heads, dim)  # row-strided, as from fused qkv
    starts = torch.tensor([0, *case.new]).cumsum(0).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    tail = (1 / math.sqrt(dim), window, case.softcap)
    return Problem(q, keys, values, k_cache, v_cache, tables, starts, lengths, tail)


def naive(case: Case, problem: Problem) -> Tensor:
    """Softmax attention one query and head at a time, from plain keys and values."""
    scale, window, softcap = problem.tail
    out = torch.empty(problem.q.shape, dtype=torch.float64)
    for s, (length, n) in enumerate(zip(case.lengths, case.new, strict=True)):
        for i in range(n):
            row, at = int(problem.starts[s]) + i, length - n + i
            low = max(0, at - window + 1) if window else 0
            for h in range(out.shape[1]):
                k = problem.keys[s][low : at + 1, h // case.group].double()
                v = problem.values[s][low : at + 1, h // case.group].double()
                x = (k * problem.q[row, h].double()).sum(-1) * scale
                x = softcap * (x / softcap).tanh() if softcap else x
                e = (x - x.max()).exp()
                out[row, h] = (e[:, None] * v).sum(0) / e.sum()
    return out.float()


def attend(kernels: ModuleType, problem: Problem) -> Tensor:
    out = torch.full(problem.q.shape, torch.nan, dtype=problem.q.dtype)
    kernels.prefill_attention(
        out,
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.tables,
        problem.starts,
        problem.lengths,
        *problem.tail,
    )
    return out


def decode(kernels: ModuleType, problem: Problem) -> Tensor:
    out = torch.full(problem.q.shape, torch.nan, dtype=problem.q.dtype)
    kernels.decode_attention(
        out,
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.tables,
        problem.lengths,
        *problem.tail,
    )
    return out


def cascade(case: Case, blocks: int, seqs: int) -> tuple[Case, int]:
    """The case with `blocks` more before each of its contexts, and their positions."""
    shared = min(blocks * case.block_size, 128 // case.block_size * case.block_size)
    own = [
        (min(n, 20), min(k, n, 20)) for n, k in zip(case.lengths, case.new, strict=True)
    ]
    lengths, new = zip(*(own * seqs)[:seqs], strict=True)
    lengths = tuple(shared + n for n in lengths)
    return replace(case, lengths=lengths, new=new, window=0), shared


def share(problem: Problem, blocks: int) -> None:
    """Let every sequence begin with the first one's blocks."""
    problem.tables[:, :blocks] = problem.tables[0, :blocks].clone()


def attend_shared(kernels: ModuleType, problem: Problem, shared: int) -> Tensor:
    out = torch.full(problem.q.shape, torch.nan, dtype=problem.q.dtype)
    scale, _, softcap = problem.tail
    kernels.cascade_attention(
        out,
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.tables,
        problem.starts,
        problem.lengths,
        shared,
        scale,
        softcap,
    )
    return out


LONG = Case((1500, 3), (1, 1), 16, 1, 3, 64, 0, 0.0, 1)
LONG_WINDOW = Case((1500, 700), (1, 1), 16, 2, 2, 16, 600, 0.0, 2)


# ------------------------------------------------------------------------- attention


@given(cases())
@settings(max_examples=25)
def test_spec_prefill_is_dense_softmax(case: Case) -> None:
    small = [
        (min(n, 40), min(k, n, 40)) for n, k in zip(case.lengths, case.new, strict=True)
    ]
    lengths, new = zip(*small, strict=True)
    case = replace(case, lengths=lengths, new=new)
    problem = build(case)
    torch.testing.assert_close(attend(spec, problem), naive(case, problem), **CLOSE)


@given(cases(decode=True))
@example(LONG)
@example(LONG_WINDOW)
@settings(max_examples=40)
def test_decode_is_spec_and_naive(case: Case) -> None:
    problem = build(case)
    expected = decode(spec, problem)
    torch.testing.assert_close(expected, naive(case, problem), **CLOSE)
    torch.testing.assert_close(decode(cpu, problem), expected, **CLOSE)


@given(cases())
@settings(max_examples=60)
def test_prefill_is_spec(case: Case) -> None:
    problem = build(case)
    torch.testing.assert_close(attend(cpu, problem), attend(spec, problem), **CLOSE)


@given(cases(decode=True))
@settings(max_examples=20)
def test_decode_is_prefill_of_one_token(case: Case) -> None:
    problem = build(case)
    torch.testing.assert_close(decode(cpu, problem), attend(cpu, problem), **CLOSE)


@BOTH
@given(case=cases(), step=st.sampled_from([1, 7, 16, 50]))
@settings(max_examples=10)
def test_chunks_equal_one_shot(kernels: ModuleType, case: Case, step: int) -> None:
    """A prompt fed in pieces, each reading what the pieces before it have cached."""
    length = min(case.lengths[0], 120)
    case = replace(case, lengths=(length,), new=(length,))
    whole = build(case)
    expected = attend(spec, whole)
    for start in range(0, length, step):
        end = min(length, start + step)
        piece = replace(
            whole,
            q=whole.q[start:end],
            starts=torch.tensor([0, end - start], dtype=torch.int32),
            lengths=torch.tensor([end], dtype=torch.int32),
        )
        torch.testing.assert_close(attend(kernels, piece), expected[start:end], **CLOSE)


def test_large_scores_stay_finite() -> None:
    """Chunks whose maxima differ by hundreds: the merge must not overflow."""
    problem = build(Case((1024,), (1,), 16, 1, 1, 16, 0, 0.0, 5))
    problem.k_cache.mul_(200)
    expected = decode(spec, problem)
    assert expected.isfinite().all()
    torch.testing.assert_close(decode(cpu, problem), expected, **CLOSE)
    torch.testing.assert_close(attend(cpu, problem), expected, **CLOSE)


def test_decode_ignores_its_neighbours() -> None:
    """Bit for bit: a sequence's result is the same alone and in a batch."""
    case = Case((700, 33, 257), (1, 1, 1), 16, 3, 3, 64, 0, 0.0, 7)
    problem = build(case)
    together = decode(cpu, problem)
    for s in range(3):
        alone = replace(
            problem,
            q=problem.q[s : s + 1],
            tables=problem.tables[s : s + 1],
            lengths=problem.lengths[s : s + 1],
        )
        assert torch.equal(decode(cpu, alone)[0], together[s])


@given(cases(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=15)
def test_spec_cascade_is_dense_softmax(case: Case, blocks: int, seqs: int) -> None:
    case, shared = cascade(case, blocks, seqs)
    problem = build(case)
    share(problem, shared // case.block_size)
    for s in range(1, seqs):  # whose beginning stands in the first one's blocks
        problem.keys[s][:shared] = problem.keys[0][:shared]
        problem.values[s][:shared] = problem.values[0][:shared]
    out = attend_shared(spec, problem, shared)
    torch.testing.assert_close(out, naive(case, problem), **CLOSE)


def test_cascade_wants_what_is_shared_before_every_query() -> None:
    problem = build(Case((9, 8), (2, 1), 4, 1, 1, 8, 0, 0.0, 3))
    attend_shared(spec, problem, 7)
    with pytest.raises(AssertionError):
        attend_shared(spec, problem, 8)


def test_empty_batch() -> None:
    problem = build(Case((5,), (5,), 4, 1, 1, 8, 0, 0.0, 3))
    none = torch.empty(0, 1, 8)
    cpu.prefill_attention(
        none.clone(),
        none,
        problem.k_cache,
        problem.v_cache,
        problem.tables[:0],
        problem.starts[:1],
        problem.lengths[:0],
        *problem.tail,
    )
    cpu.decode_attention(
        none.clone(),
        none,
        problem.k_cache,
        problem.v_cache,
        problem.tables[:0],
        problem.lengths[:0],
        *problem.tail,
    )


# ------------------------------------------------------------------- matrix products


@given(
    rows=st.one_of(st.integers(0, 14), st.integers(15, 70)),
    n=st.one_of(st.sampled_from([16, 32, 96, 128]), st.integers(1, 70)),
    k=st.integers(1, 70),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
def test_linear(rows: int, n: int, k: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=make)
    x = torch.randn(rows, k + 5, generator=make)[:, 2 : k + 2]  # row-strided
    assert torch.equal(cpu.pack(weight), spec.pack(weight, cpu.COLUMNS))
    for kernels in (spec, cpu):
        out = torch.full((rows, n), torch.nan)
        kernels.linear(out, x, kernels.pack(weight))
        torch.testing.assert_close(out, x @ weight.T, **CLOSE)


def test_a_row_times_a_matrix_ignores_its_neighbours() -> None:
    """To the last bit: whatever tiles the other rows make, the sum has one order."""
    make = torch.Generator().manual_seed(0)
    panels = cpu.pack(torch.randn(80, 300, generator=make))
    x = torch.randn(40, 300, generator=make)
    alone = torch.empty(40, 80)
    for i in range(40):
        cpu.linear(alone[i : i + 1], x[i : i + 1], panels)
    for rows in range(2, 40):
        out = torch.empty(rows, 80)
        cpu.linear(out, x[-rows:], panels)
        assert torch.equal(out, alone[-rows:])


# ------------------------------------------------------------------------ writing KV


@given(
    tokens=st.integers(0, 70),
    kv_heads=st.integers(1, 4),
    dim=st.sampled_from([1, 8, 20, 64]),
    block_size=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_write_kv(
    tokens: int, kv_heads: int, dim: int, block_size: int, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(tokens, 3 * kv_heads * dim + 5, generator=make)
    key = fused[:, 2 : 2 + kv_heads * dim].view(tokens, kv_heads, dim)
    value = fused[:, 5 + kv_heads * dim : 5 + 2 * kv_heads * dim]
    value = value.view(tokens, kv_heads, dim)
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm((blocks - 1) * block_size, generator=make) + block_size
    slots = slots[:tokens]
    caches = [
        spec.empty_kv(blocks, kv_heads, block_size, dim, torch.float32) for _ in "ab"
    ]
    for (k_cache, v_cache), kernels in zip(caches, (spec, cpu), strict=True):
        k_cache.fill_(7)
        v_cache.fill_(8)
        kernels.write_kv(key, value, k_cache, v_cache, slots)
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    for t, slot in enumerate(slots.tolist()):  # the layout, said another way
        block, offset = divmod(slot, block_size)
        assert torch.equal(caches[0][0][block, :, offset], key[t])
        assert torch.equal(caches[0][1][block, :, offset], value[t])


@given(copies=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_spec_copy_blocks(copies: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    k_cache, v_cache = torch.randn(2, 9, 2, 3, 4, generator=make)
    sources, targets = torch.randperm(9, generator=make)[: 2 * copies].view(2, -1)
    expected = k_cache.clone(), v_cache.clone()
    for i, j in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[0][j], expected[1][j] = k_cache[i], v_cache[i]
    spec.copy_blocks(k_cache, v_cache, sources, targets)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


# ------------------------------------------------ mixtures of experts, and sampling


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 99)
)
@settings(max_examples=20)
def test_spec_grouped_linear(sizes: list[int], seed: int) -> None:
    x, weights, tokens, starts = experts(sizes, 6, 7, 5, seed)
    out = torch.full((sum(sizes), 7), torch.nan)
    spec.grouped_linear(out, x, weights, tokens, starts)
    expert = [e for e, n in enumerate(sizes) for _ in range(n)]
    for i, e in enumerate(expert):
        torch.testing.assert_close(out[i], weights[e] @ x[tokens[i]], **CLOSE)


def experts(
    sizes: list[int], tokens: int, n: int, k: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weights, tokens, starts) for experts that serve `sizes` rows each."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k + 3, generator=make)[:, :k]  # row-strided
    weights = torch.randn(len(sizes), n, k, generator=make)
    chosen = torch.randint(0, tokens, (sum(sizes),), generator=make)
    return x, weights, chosen, torch.tensor([0, *sizes]).cumsum(0)


NUMBER = st.sampled_from([0.0, 0.1, 0.5, 1.3, 2.0])


@st.composite
def sampling_cases(draw: st.DrawFn, vocab: int = 40) -> tuple[SamplingParams, float]:
    """One row's filters, and its random number."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, vocab - 1, vocab, 2 * vocab])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0])),
    )
    return params, draw(st.sampled_from([0.0, 0.2, 0.5, 0.77, 1 - 2**-53]))


def logits_of(rows: int, vocab: int, seed: int) -> Tensor:
    """Logits with many equal ones, zeros of both signs, and some that are ruled out."""
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=make).mul(4).round() / 2
    logits[torch.rand(rows, vocab, generator=make) < 0.1] = -torch.inf
    logits[torch.rand(rows, vocab, generator=make) < 0.1] = -0.0
    logits[:, -1] = 0.0
    return logits


def sample_rows(
    kernels: ModuleType, logits: Tensor, rows: list[tuple[SamplingParams, float]]
) -> list[int]:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(p, name) for p, _ in rows], dtype=dtype)

    out = torch.full((len(rows),), -1)
    kernels.sample(
        out,
        logits,
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float64),
        column("min_p", torch.float32),
        torch.tensor([u for _, u in rows], dtype=torch.float64),
    )
    return out.tolist()


@given(st.lists(sampling_cases(), min_size=1, max_size=8), st.integers(0, 999))
def test_spec_sample_is_the_samplers(
    rows: list[tuple[SamplingParams, float]], seed: int
) -> None:
    logits = logits_of(len(rows), 40, seed)
    found = sample_rows(spec, logits.clone(), rows)
    for row, (params, u), token in zip(logits.numpy(), rows, found, strict=True):
        if params.greedy:
            assert token == row.argmax()
            continue
        ids, weights = survivors(row, float(row.max()), params)
        i = pick(weights, u)
        assert token == (i if ids is None else ids[i])


def seen_tokens(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, counts, starts) of what each row has seen; some have seen nothing."""
    make = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, vocab // 2, (rows,), generator=make)
    sizes[torch.rand(rows, generator=make) < 0.2] = 0
    ids = [torch.randperm(vocab, generator=make)[:n] for n in sizes.tolist()]
    counts = torch.randint(0, 4, (int(sizes.sum()),), generator=make)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    return torch.cat(ids), counts, starts


def penalties(rows: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's (repetition, frequency, presence) as columns."""
    repetition, frequency, presence = torch.tensor(
        rows, dtype=torch.float64
    ).T.contiguous()
    return repetition.float(), frequency, presence


PENALTIES = st.tuples(NUMBER.map(lambda x: 1 + x), NUMBER, NUMBER.map(lambda x: -x))


@given(st.lists(PENALTIES, min_size=1, max_size=6), st.integers(0, 999))
def test_spec_penalize_is_the_samplers(
    rows: list[tuple[float, float, float]], seed: int
) -> None:
    logits = logits_of(len(rows), 40, seed)
    ids, counts, starts = seen_tokens(len(rows), 40, seed)
    expected = logits.clone()
    for r, (repetition, frequency, presence) in enumerate(rows):
        mine = slice(*starts[r : r + 2].tolist())
        seen = SimpleNamespace(ids=ids[mine].numpy(), counts=counts[mine].numpy())
        penalize(expected[r].numpy(), seen, repetition)
        discourage(expected[r].numpy(), seen, frequency, presence)
    spec.penalize(logits, ids, counts, starts, *penalties(rows))
    assert torch.equal(logits, expected)


# -------------------------------------------------- norms, rotation and activations

ROWS = st.sampled_from([0, 1, 2, 5, 33, 200])


@given(rows=ROWS, dim=st.sampled_from([1, 7, 64, 576]), seed=st.integers(0, 999))
@settings(max_examples=25)
def test_norms(rows: int, dim: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, dim, generator=make)
    weight, eps = torch.randn(dim, generator=make), 1e-5
    expected = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    for kernels in (spec, cpu):
        out = torch.empty_like(x)
        kernels.rms_norm(out, x, weight, eps)
        torch.testing.assert_close(out, expected, **CLOSE)
    outs, residuals = torch.empty(2, rows, dim), residual.repeat(2, 1, 1)
    spec.add_rms_norm(outs[0], residuals[0], x, weight, eps)
    cpu.add_rms_norm(outs[1], residuals[1], x, weight, eps)
    assert torch.equal(residuals[0], residual + x)
    assert torch.equal(residuals[1], residual + x)
    torch.testing.assert_close(outs[1], outs[0], **CLOSE)


@given(rows=ROWS, heads=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_norm_of_heads_in_place(rows: int, heads: int, seed: int) -> None:
    """As Qwen3 norms its queries: every head by itself, in the fused matrix."""
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, heads * 16 + 4, generator=make)
    weight = torch.randn(16, generator=make)
    copies = [fused.clone(), fused.clone()]
    for kernels, copy in zip((spec, cpu), copies, strict=True):
        view = copy[:, 4:].view(rows, heads, 16)
        kernels.rms_norm(view, view, weight, 1e-6)
    torch.testing.assert_close(copies[1], copies[0], **CLOSE)
    assert torch.equal(copies[1][:, :4], fused[:, :4])


@given(
    rows=ROWS,
    dims=st.sampled_from([(64, 64), (64, 32), (20, 10), (8, 2)]),
    heads=st.sampled_from([(9, 3), (1, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_rotary(
    rows: int, dims: tuple[int, int], heads: tuple[int, int], seed: int
) -> None:
    (dim, rotary_dim), (h, kvh) = dims, heads
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, (h + 2 * kvh) * dim, generator=make)
    positions = torch.randint(0, 50, (rows,), generator=make)
    angles = torch.rand(50, rotary_dim // 2, generator=make) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    results = []
    for kernels in (spec, cpu):
        copy = fused.clone()
        q = copy[:, : h * dim].view(rows, h, dim)
        k = copy[:, h * dim : (h + kvh) * dim].view(rows, kvh, dim)
        kernels.rotary(q, k, positions, cos_sin)
        results.append(copy)
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    # The formula again, as a product of complex numbers.
    half, both = rotary_dim // 2, fused[:, : (h + kvh) * dim]
    both = both.view(rows, h + kvh, dim)
    turned = torch.complex(both[..., :half], both[..., half:rotary_dim])
    turned = turned * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    parts = [turned.real, turned.imag, both[..., rotary_dim:]]
    expected = torch.cat(parts, -1).view(rows, (h + kvh) * dim)
    torch.testing.assert_close(results[0][:, : (h + kvh) * dim], expected, **CLOSE)
    assert torch.equal(results[1][:, (h + kvh) * dim :], fused[:, (h + kvh) * dim :])


@given(rows=ROWS, rotary_dim=st.sampled_from([16, 8]), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_rotary_write_is_rotary_then_write(
    rows: int, rotary_dim: int, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    fused = torch.randn(rows, 5 * 16, generator=make)  # 3 heads, 1 KV head
    positions = torch.randint(0, 50, (rows,), generator=make)
    cos_sin = torch.randn(50, rotary_dim, generator=make)
    slots = torch.randperm(4 * 60, generator=make)[:rows]
    found = []
    for kernels in (spec, cpu, None):
        heads = fused.clone().view(rows, 5, 16)
        q, k, v = heads.split([3, 1, 1], dim=1)
        caches = torch.zeros(60, 1, 4, 16), torch.zeros(60, 1, 4, 16)
        if kernels is None:
            spec.rotary(q, k, positions, cos_sin)
            spec.write_kv(k, v, *caches, slots)
        else:
            kernels.rotary_write(q, k, v, positions, cos_sin, *caches, slots)
        found.append((q, *caches))
    for some in found[:2]:
        for actual, expected in zip(some, found[2], strict=True):
            torch.testing.assert_close(actual, expected, **CLOSE)


@given(
    rows=st.sampled_from([0, 1, 5, 6, 7, 40]),
    panels=st.sampled_from([1, 3]),
    depth=st.integers(1, 40),
    name=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_gated_products(
    rows: int, panels: int, depth: int, name: str, seed: int
) -> None:
    make, width = torch.Generator().manual_seed(seed), panels * cpu.COLUMNS
    gate, up = torch.randn(2, width, depth, generator=make)
    x = torch.randn(rows, depth + 1, generator=make)[:, :depth]
    expected = torch.empty(rows, width)
    both = torch.cat((x @ gate.T, x @ up.T), -1)
    getattr(spec, f"{name}_mul")(expected, both)
    for kernels in (spec, cpu):
        out = torch.full((rows, width), torch.nan)
        weight = kernels.pack(torch.cat((gate, up)))
        getattr(kernels, f"{name}_linear")(out, x, weight)
        torch.testing.assert_close(out, expected, **CLOSE)


@given(rows=ROWS, width=st.sampled_from([1, 9, 96]), spread=st.sampled_from([1, 30]))
@settings(max_examples=25)
def test_activations(rows: int, width: int, spread: int) -> None:
    make = torch.Generator().manual_seed(rows + width)
    gate_up = torch.randn(rows, 2 * width, generator=make) * spread
    gate, up = gate_up.double().chunk(2, -1)
    silu = gate / (1 + (-gate).exp()) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gelu = gate / 2 * (1 + inner.tanh()) * up
    for kernels in (spec, cpu):
        out = torch.empty(rows, width)
        kernels.silu_mul(out, gate_up)
        torch.testing.assert_close(out, silu.float(), **CLOSE)
        kernels.gelu_tanh_mul(out, gate_up)
        torch.testing.assert_close(out, gelu.float(), **CLOSE)


def test_activations_at_the_edges() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4] + [1.0] * 7])
    for name in ("silu_mul", "gelu_tanh_mul"):
        outs = torch.empty(2, 1, 7)
        getattr(spec, name)(outs[0], gate_up)
        getattr(cpu, name)(outs[1], gate_up)
        torch.testing.assert_close(outs[1], outs[0], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_empty_kv(dtype: torch.dtype) -> None:
    k_cache, v_cache = spec.empty_kv(5, 3, 4, 2, dtype)
    for cache in (k_cache, v_cache):
        assert cache.shape == (5, 3, 4, 2) and cache.dtype == dtype
        assert cache.is_contiguous()
    assert k_cache.data_ptr() != v_cache.data_ptr()


def test_attention_stays_on_its_inputs_device() -> None:
    """Whatever torch's default device is: here one that holds no numbers."""
    case = Case((9, 5), (1, 1), 4, 1, 2, 8, 3, 0.0, 4)
    problem = build(case)
    expected = naive(case, problem)
    outs = torch.empty(2, *problem.q.shape)
    with torch.device("meta"):
        spec.prefill_attention(
            outs[0],
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.tables,
            problem.starts,
            problem.lengths,
            *problem.tail,
        )
        spec.decode_attention(
            outs[1],
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.tables,
            problem.lengths,
            *problem.tail,
        )
    for out in outs:
        torch.testing.assert_close(out, expected, **CLOSE)


# ---------------------------------------------------------------- package and cache


def test_same_signatures() -> None:
    """Every kernel of the specification exists here, but those for GPUs alone."""
    gpu = {"cascade_attention", "copy_blocks", "grouped_linear", "penalize", "sample"}
    names = {
        n.name
        for n in ast.parse((ROOT / "kernels/spec.py").read_text()).body
        if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")
    }
    assert all(callable(getattr(cpu, name)) for name in names - gpu)


def test_wrong_dtype_is_refused() -> None:
    with pytest.raises(TypeError):
        cpu.silu_mul(torch.empty(2, 4), torch.zeros(2, 8, dtype=torch.float64))


def test_the_folder_is_not_hugging_faces_package() -> None:
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    doc, version = tree.body
    assert isinstance(doc, ast.Expr)
    assert ast.unparse(version) == "__version__ = '0'"
    script = (
        "import kernels, transformers\n"
        "from transformers.utils import is_kernels_available\n"
        "assert kernels.__version__ == '0'\n"
        "assert not is_kernels_available()\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_import_compiles_nothing_and_cache_dir_is_the_users(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "from pagedattn.kernels import cpu\n"
        "assert 'compiled' not in vars(cpu.silu_mul)\n"
        "print(cpu.cache_dir().parent)\n"
        "os.environ['XDG_CACHE_HOME'] = os.environ['HOME'] + '/x'\n"
        "print(cpu.cache_dir().parent)\n"
        "os.environ['PAGEDATTN_CACHE'] = os.environ['HOME'] + '/p'\n"
        "print(cpu.cache_dir().parent)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin", "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = [".cache/pagedattn/kernels", "x/pagedattn/kernels", "p/kernels"]
    assert done.stdout.split() == [str(tmp_path / place) for place in expected]
    assert list(tmp_path.rglob("*.nbi")) == []


def test_another_processor_has_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cpu.cache_dir()
    monkeypatch.setattr(cpu.numba.config, "CPU_NAME", "generic")
    assert cpu.cache_dir() != here


def test_compile_all_reports_progress() -> None:
    seen = []
    cpu.compile_all(lambda name, done, of: seen.append((name, done, of)))
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert seen[-1][1] == seen[-1][2]
    assert {"decode_attention", "prefill_attention"} <= {name for name, _, _ in seen}
