"""What a step does, counted: kernels, products, tensors, bytes. No clock is read, so a
step that does more than it did fails here on any machine, however busy.

Whoever changes the kernels on purpose changes the table below.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pagedattn.kernels import cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedattn import LLM, SamplingParams
from pagedattn.bench import profile
from pagedattn.bench.ceilings import Ceilings
from pagedattn.engine import Engine
from pagedattn.model import linear
from pagedattn.testing import make_tiny_model

# A step of the tiny model: 2 layers, 4 running requests of 8 tokens that decode; and
# the same with a prompt of 40 tokens beside them.
DECODE = {
    "add_rms_norm": 5,
    "linear": 7,  # 3 in each layer, and the head
    "rotary_write": 2,
    "decode_attention": 2,
    "silu_linear": 2,
}
LAUNCHES = {"decode": DECODE, "mixed": {**DECODE, "prefill_attention": 2}}
# Tensors with memory of their own that torch's operators make.
TENSORS = {"decode": 3, "mixed": 3}
# Bytes that the spans of `bench.profile` cannot avoid to move.
BYTES = {"decode": 149_568, "mixed": 437_456}

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


class Tensors(TorchDispatchMode):
    """Counts, by operator, the tensors that come with memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = set(places((args, kwargs)))
        result = function(*args, **(kwargs or {}))
        new = set(places(result)) - given
        self.made[str(function).removeprefix("aten.")] += len(new)
        return result


def places(values: Any) -> Iterator[int]:
    """Where the memory of each tensor in some values begins."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """With our own products, whatever this processor would choose."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    sizes = {"kv_cache_memory_bytes": "4M", "max_num_batched_tokens": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "linear_backend", lambda: "panels")
        return LLM(str(folder), **sizes).llm_engine


@contextmanager
def steps(engine: Engine, kind: str) -> Iterator[None]:
    """Four running requests, and a prompt if the next step shall be mixed; ended
    afterwards."""
    for i in range(4):
        engine.add_request(str(i), list(range(10 * i, 10 * i + 8)), GREEDY)
    engine.step()
    engine.step()
    if kind == "mixed":
        engine.add_request("prompt", list(range(100, 140)), GREEDY)
    yield
    for id in ("0", "1", "2", "3", "prompt"):
        engine.abort_request(id)
    engine.step()
    engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("kind", LAUNCHES)
def test_kernels_launched(
    kind: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: Counter[str] = Counter()
    call = cpu.Kernel.__call__

    def counted(self: cpu.Kernel, *args: Any) -> None:
        launched[self.body.__name__] += 1
        call(self, *args)

    with steps(engine, kind):
        monkeypatch.setattr(cpu.Kernel, "__call__", counted)
        engine.step()
    assert launched == LAUNCHES[kind]


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_made(kind: str, engine: Engine) -> None:
    with steps(engine, kind), Tensors() as tensors:
        engine.step()
    assert tensors.made.total() == TENSORS[kind], +tensors.made


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_moved(kind: str, engine: Engine) -> None:
    measured = profile.Profile(Ceilings(1.0, 1.0, 1.0, 1.0, 1))
    with steps(engine, kind), measured.attached(engine):
        engine.step()
    assert sum(row.bytes for row in measured.rows().values()) == BYTES[kind]
