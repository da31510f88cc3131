"""The device runner end to end on a tiny model, its kernels under Triton's interpreter:
tokens equal the numba path's, through the same assembly as on a card."""

import sys

import pytest
import torch
from fake_device import FakeDevice
from pagedattn.kernels import cpu

from pagedattn import assembly
from pagedattn.config import EngineArgs
from pagedattn.device import cuda
from pagedattn.engine import Engine
from pagedattn.errors import NotSupported, UserError
from pagedattn.intake import Intake
from pagedattn.metrics import Metrics
from pagedattn.model import loader, source
from pagedattn.pipeline import PipelinedEngine
from pagedattn.request import SamplingParams
from pagedattn.runner import Runner
from pagedattn.testing import make_tiny_model

pytest.importorskip("triton", reason="Triton is for Linux")

from pagedattn.kernels import gpu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def args_for(folder, **changes):
    settings = dict(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64)
    settings |= dict(num_gpu_blocks_override=24, block_size=4)
    return EngineArgs(model=str(folder), **(settings | changes))


def join(kind, config, scheduler, runner):
    intake = Intake(config, scheduler.tables.capacity(), 260, (), None)
    return kind(config, scheduler, runner, intake, Metrics("tiny", 64, {}))


def on_processor(args, found):
    model = loader.load(found, cpu, 64)
    groups = assembly.group_layers(model.spec.windows)
    config, scheduler = assembly._plan_cache(args, model.spec, groups)
    caches = assembly._new_cache(config, model.spec)
    return join(Engine, config, scheduler, Runner(model, groups, 4, caches))


def on_fake_card(args, found, **placement):
    model = loader.load(found, gpu, 64, None, loader.Placement(**placement))
    card = FakeDevice()
    return join(PipelinedEngine, *assembly.on_card(args, model, gpu, card, card.free))


def generated(engine):
    """A prefix hit, a draw, a neighbour that comes late, and log-probabilities."""
    wishes = (
        dict(temperature=0.0),
        dict(temperature=0.7, seed=3, top_k=20, top_p=0.9),
        dict(temperature=0.0, logprobs=2),
    )
    last = {}
    for i, wish in enumerate(wishes):
        prompt = [65, 66, 67, 68, 69, 70, 71, 72, 73 + i]
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=5, **wish))
        for output in engine.step():
            last[output.request_id] = output
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    engine.check()
    return {name: list(o.outputs[0].token_ids) for name, o in last.items()}


def test_tokens_equal_the_numba_paths(tmp_path):
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    args = args_for(found.path, cudagraph_capture_sizes=[1, 2])
    engine = on_fake_card(args, found)
    expected = generated(on_processor(args, found))
    assert generated(engine) == expected
    counts = engine.runner.machine.counts
    assert counts["record"] == 2 and counts["replay"] > 0


def test_half_precision_computes_in_halves(tmp_path):
    """float16 from weights to cache; logits are float32, and nearly float32's."""
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    args = args_for(found.path, enforce_eager=True)
    engine = on_fake_card(args, found, dtype=torch.float16)
    runner = engine.runner
    assert runner.caches[0].k.dtype == torch.float16
    assert runner.model.layers[0].attention.qkv.weight.dtype == torch.float16
    logits = []
    inner = runner._draw
    runner._draw = lambda out, x, *a: (logits.append(x.clone()), inner(out, x, *a))
    other = on_processor(args, found)
    plain = []
    head = type(other.runner.model).logits
    model = other.runner.model
    other.runner.model = Listening(model, head, plain)
    for one in (engine, other):
        params = SamplingParams(max_tokens=1, temperature=0)
        one.add_request("a", [65, 66, 67], params)
        while one.has_unfinished_requests():
            one.step()
    assert logits[0].dtype == torch.float32
    torch.testing.assert_close(logits[0], plain[0], rtol=0.05, atol=0.15)


class Listening:
    """A model whose logits are kept."""

    def __init__(self, model, head, kept):
        self.spec, self.forward = model.spec, model.forward
        self.model, self.head, self.kept = model, head, kept

    def logits(self, hidden):
        found = self.head(self.model, hidden)
        self.kept.append(found.clone())
        return found


# ---------------------------------------------------------------------- what is refused


def test_without_a_card_cuda_is_refused_and_auto_is_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.choose_device("auto") == cuda.choose_device("cpu") == "cpu"
    with pytest.raises(UserError, match="device='cuda' cannot be used"):
        cuda.choose_device("cuda")


def test_without_triton_a_card_is_of_no_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda.choose_device("auto") == "cuda"
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert cuda.choose_device("auto") == "cpu"
    with pytest.raises(UserError, match="pagedattn\\[gpu\\]"):
        cuda.choose_device("cuda")


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"dtype": "half"}, {"async_scheduling": True}]
)
def test_a_processor_refuses_what_only_a_card_does(tmp_path, changes):
    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(UserError, match="needs device='cuda'"):
        assembly.assemble(EngineArgs(model=str(folder), device="cpu", **changes))


def test_what_is_not_built_says_so():
    with pytest.raises(NotSupported, match="torch.compile"):
        EngineArgs(optimization_level=2)
    with pytest.raises(NotSupported, match="PIECEWISE is not built"):
        assembly.buckets_of(EngineArgs(cudagraph_mode="PIECEWISE"), 4, 64)


def test_auto_dtype_is_the_files_own():
    assert assembly.dtype_on_card("auto", "float16") == torch.float16
    assert assembly.dtype_on_card("auto", "float32") == torch.bfloat16
    assert assembly.dtype_on_card("auto", None) == torch.bfloat16
    assert assembly.dtype_on_card("float", "bfloat16") == torch.float32


def test_running_on_a_processor_loads_no_triton(tmp_path):
    """Importing the device's modules brings in torch, and no compiler for cards."""
    code = "import sys, pagedattn.assembly; assert 'triton' not in sys.modules"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)
