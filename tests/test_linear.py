"""Linear against torch's own product, at every row count that an engine step meets."""

import gc
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pagedattn.model import linear as module
from pagedattn.model.linear import Linear, linear_backend

BACKENDS = ["panels", "F.linear"] + ["oneDNN"] * module._onednn_works()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to multiply that this machine has, whichever it would choose."""
    monkeypatch.setattr(module, "linear_backend", lambda: request.param)
    return request.param


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(0, 40),
    n=st.integers(1, 130),
    k=st.integers(1, 130),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(rows=1, n=1, k=1, bias=True, seed=0)
@example(rows=3, n=16, k=1, bias=False, seed=0)
def test_is_f_linear(
    backend: str, rows: int, n: int, k: int, bias: bool, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k + 3, generator=make)[:, 2 : k + 2]  # row-strided
    weight = torch.randn(n, k, generator=make)
    b = torch.randn(n, generator=make) if bias else None
    close(Linear(weight, b)(x), functional.linear(x, weight, b))


def test_all_row_counts(backend: str) -> None:
    """One packed weight, rows 1 to 600; equal calls give equal bits."""
    make = torch.Generator().manual_seed(1)
    weight, b = torch.randn(192, 64, generator=make), torch.randn(192, generator=make)
    x = torch.randn(600, 64, generator=make)
    linear, expected = Linear(weight, b), functional.linear(x, weight, b)
    for rows in [*range(1, 40), *range(40, 601, 17), 600]:
        out = linear(x[:rows])
        close(out, expected[:rows])
        assert torch.equal(out, linear(x[:rows]))


@pytest.mark.parametrize("biases", ["all", "some", "none"])
def test_fused(backend: str, biases: str) -> None:
    make = torch.Generator().manual_seed(2)
    weights = [torch.randn(n, 24, generator=make) for n in (8, 16, 5)]
    given_biases = [torch.randn(len(w), generator=make) for w in weights]
    keep = {"all": 3, "some": 2, "none": 0}[biases]
    bs = [b if i < keep else None for i, b in enumerate(given_biases)]
    x = torch.randn(7, 24, generator=make)
    parts = [functional.linear(x, w, b) for w, b in zip(weights, bs, strict=True)]
    close(Linear.fused(weights, bs)(x), torch.cat(parts, -1))
    if biases == "none":
        close(Linear.fused(weights)(x), torch.cat(parts, -1))


@pytest.mark.parametrize(
    ("vectors", "onednn", "chosen"),
    [
        ("AVX2", True, "panels"),
        ("AVX512", True, "panels"),
        ("DEFAULT", True, "oneDNN"),
        ("DEFAULT", False, "F.linear"),
    ],
)
def test_the_backend_fits_the_processor(
    vectors: str, onednn: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(module, "_onednn_works", lambda: onednn)
    assert linear_backend.__wrapped__() == chosen


def test_other_dtypes_are_left_to_torch(backend: str) -> None:
    weight, x = torch.randn(10, 4).double(), torch.randn(3, 4).double()
    close(Linear(weight)(x), functional.linear(x, weight))


def test_plain_weight_is_freed(backend: str) -> None:
    weight = torch.randn(64, 64)
    if backend == "F.linear":
        assert Linear(weight).weight.data_ptr() == weight.data_ptr()
        return
    gone = weakref.ref(weight)
    linear = Linear(weight)
    del weight
    gc.collect()
    assert gone() is None
    assert linear(torch.ones(1, 64)).shape == (1, 64)


def test_panels_are_offered_where_two_maps_may_meet(backend: str) -> None:
    """Whole panels, no bias, and the product that reads them; else None."""
    pairs = 4 * module.cpu.COLUMNS
    weight, bias = torch.randn(pairs, 8), torch.randn(pairs)
    offered = Linear(weight.clone()).panels
    assert (offered is not None) == (backend == "panels")
    assert Linear(weight.clone(), bias).panels is None
    assert Linear(weight[: pairs - 16].clone()).panels is None


@pytest.mark.parametrize(
    ("rates", "rows"),
    [
        ([10, 20, 30, 40, 50], 512),
        ([80, 91, 95, 99, 100], 64),
        ([100, 80, 80, 80, 80], 32),
        ([10, 50, 90, 85, 100], 128),
    ],
)
def test_the_knee_is_where_rates_level_off(rates: list[float], rows: int) -> None:
    assert module.knee(rates) == rows
    assert module.measured_knee() in module.ROWS
