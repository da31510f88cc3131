"""The device runner end to end on a tiny model, its kernels under Triton's interpreter:
tokens equal the numba path's, through the same assembly as on a card."""

import json
import sys

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from pagedattn.kernels import cpu
from safetensors.torch import load_file, save_file

from pagedattn import assembly
from pagedattn.config import EngineArgs
from pagedattn.device import cuda, prefix
from pagedattn.device import runner as device_runner
from pagedattn.device.runner import Limits
from pagedattn.engine import Engine
from pagedattn.errors import NotSupported, UserError
from pagedattn.intake import Intake
from pagedattn.metrics import Metrics
from pagedattn.model import loader, source
from pagedattn.model.decoder import GroupedMLP, visits
from pagedattn.pipeline import PipelinedEngine
from pagedattn.request import SamplingParams
from pagedattn.runner import Runner
from pagedattn.scheduler import Item
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


MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "qkv_bias": False,
}


def make_moe(folder, seed=0):
    """The tiny model with experts for MLPs."""
    make_tiny_model(folder, width=64)
    config = json.loads((folder / "config.json").read_text()) | MOE
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    for name in [name for name in weights if ".mlp." in name]:
        del weights[name]

    def add(name, *shape):
        weights[f"{name}.weight"] = torch.randn(shape, generator=draw) / 4

    for i in range(2):
        at = f"model.layers.{i}.mlp."
        add(f"{at}gate", 5, 64)
        add(f"{at}shared_expert_gate", 1, 64)
        for n, width in [
            *((f"experts.{n}", 24) for n in range(5)),
            ("shared_expert", 40),
        ]:
            add(f"{at}{n}.gate_proj", width, 64)
            add(f"{at}{n}.up_proj", width, 64)
            add(f"{at}{n}.down_proj", 64, width)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_mixture_of_experts_has_the_numba_paths_tokens(tmp_path):
    """Recorded, padded and mixed steps: nothing of the routing is asked of the
    device."""
    found = source.resolve(str(make_moe(tmp_path / "m")))
    args = args_for(found.path, cudagraph_capture_sizes=[2])
    engine = on_fake_card(args, found)
    assert isinstance(engine.runner.model.layers[0].mlp, GroupedMLP)
    assert generated(engine) == generated(on_processor(args, found))
    assert engine.runner.machine.counts["replay"] > 0


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=9), st.integers(1, 3))
def test_visits_are_sorted_by_expert_and_found_again(rows, top_k):
    chosen = torch.tensor(rows)[:, :top_k]
    sources, starts, places = visits(chosen, 4)
    for expert in range(4):
        mine = sources[starts[expert] : starts[expert + 1]].tolist()
        assert mine == [t for t, row in enumerate(chosen.tolist()) if expert in row]
    for t, row in enumerate(places.tolist()):
        assert [int(sources[at]) for at in row] == [t] * top_k
        found = [int((starts[1:] <= at).sum()) for at in row]
        assert found == chosen[t].tolist()


@pytest.mark.parametrize("type", ["LAST", "MEAN", "CLS"])
def test_embeddings_are_the_numba_paths(tmp_path, type):
    """In chunks, beside a request that generates meanwhile."""
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    args = args_for(found.path, cudagraph_capture_sizes=[1, 2])
    pooled = []
    for engine in (on_processor(args, found), on_fake_card(args, found)):
        accept = engine.intake.accept
        greedy = SamplingParams(max_tokens=6, temperature=0)
        engine.add(accept("text", [70, 71, 72], greedy))
        engine.step()
        prompt = [65 + i for i in range(25)]  # two steps' worth
        engine.add(accept("vector", prompt, SamplingParams(max_tokens=1), pooling=type))
        last = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        engine.check()
        pooled.append(last["vector"].pooled)
        assert len(last["text"].outputs[0].token_ids) == 6
    torch.testing.assert_close(pooled[1], pooled[0], rtol=1e-4, atol=1e-4)


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


SHAPED = (
    dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    dict(logit_bias={"70": 9.0}, temperature=0.8, seed=4, top_k=30),
    dict(min_tokens=4, stop_token_ids=list(range(200))),
)


@pytest.mark.parametrize("wish", SHAPED)
def test_shaped_rows_have_the_host_samplers_tokens(tmp_path, monkeypatch, wish):
    """Beside a plain one; of a step's logits only theirs come to the host."""
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    args = args_for(found.path, cudagraph_capture_sizes=[2])
    tokens, rows = [], []
    for engine in (on_processor(args, found), on_fake_card(args, found)):
        if tokens:
            monkeypatch.setattr(device_runner, "sample", counting(rows))
        for name, asked in (("plain", {}), ("shaped", wish)):
            params = SamplingParams(max_tokens=6, **(dict(temperature=0.0) | asked))
            engine.add_request(name, [65, 66, 67, 68, 69], params)
        last = {}
        while engine.has_unfinished_requests():
            last |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
        tokens.append(last)
    assert tokens[0] == tokens[1]
    assert rows and set(rows) == {1}


def counting(rows):
    """The host's sampler, which notes how many rows it gets."""
    inner = device_runner.sample

    def sample(logits, states):
        rows.append(len(logits))
        return inner(logits, states)

    return sample


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
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "half"},
        {"async_scheduling": True},
        {"disable_cascade_attn": False},
    ],
)
def test_a_processor_refuses_what_only_a_card_does(tmp_path, changes):
    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(UserError, match="needs device='cuda'"):
        assembly.assemble(EngineArgs(model=str(folder), device="cpu", **changes))


def test_what_is_not_built_says_so():
    with pytest.raises(NotSupported, match="torch.compile"):
        EngineArgs(optimization_level=2)
    with pytest.raises(UserError, match="cudagraph_mode must be one of"):
        assembly.buckets_of(EngineArgs(cudagraph_mode="ALL"), Limits(8, 4), 64)


def test_each_mode_records_what_it_says():
    def found(mode, **changes):
        args = EngineArgs(cudagraph_mode=mode, **changes)
        buckets = assembly.buckets_of(args, Limits(7, 4), 64)
        return buckets.sizes, buckets.tokens, buckets.most

    assert found("NONE") == ((), (), 0) == found("FULL", enforce_eager=True)
    assert found("FULL_DECODE_ONLY") == ((1, 2, 4), (), 0)
    assert found("PIECEWISE") == ((), (1, 2, 4, 7), 0)
    assert found("FULL_AND_PIECEWISE") == ((1, 2, 4), (1, 2, 4, 7), 0)
    assert found("FULL") == ((1, 2, 4), (1, 2, 4, 7), 4)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_no_mode_changes_a_token(tmp_path, mode):
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    sizes = dict(cudagraph_capture_sizes=[2, 6])
    engine = on_fake_card(args_for(found.path, cudagraph_mode=mode, **sizes), found)
    assert generated(engine) == generated(on_processor(args_for(found.path), found))
    counts = engine.runner.machine.counts
    pieces = 2 * 3  # two layers
    expected = {"PIECEWISE": pieces, "FULL": 2 + 2, "FULL_AND_PIECEWISE": 2 + pieces}
    assert counts["record"] == expected[mode] and counts["replay"] > 0


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


# ------------------------------------------------------------------------ one for all


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 12), min_size=2, max_size=6),
    st.integers(0, 40),
)
def test_what_contexts_share_is_found_to_the_block(size, agree, start):
    """Request i has its first `agree[i]` blocks from the others, then its own."""
    width = start // size + 1
    table = list(range(1, width + 1))
    items = [
        Item(
            f"r{i}",
            0,
            start,
            (5,),
            ([*table[:n], *range(1000 * (i + 1), 1000 * (i + 1) + width - n)][:width],),
            True,
        )
        for i, n in enumerate(agree)
    ]
    least = sorted(agree)
    found = prefix.common_prefix(items, size)
    assert found % size == 0 and found <= start
    assert found == min(least[0], start // size) * size


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
def test_reading_a_shared_prefix_once_changes_no_token(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(prefix, "FEWEST", 2)
    monkeypatch.setattr(prefix, "SHORTEST", 4)
    found = source.resolve(str(make_tiny_model(tmp_path / "m", width=64)))
    args = args_for(found.path, disable_cascade_attn=False, cudagraph_mode=mode)
    engine = on_fake_card(args, found)
    calls, inner = [], gpu.cascade_attention

    def listening(*args):
        calls.append(args[7])
        inner(*args)

    for layer in engine.runner.model.layers:
        assert layer.attention.kernels is gpu
    monkeypatch.setattr(gpu, "cascade_attention", listening)
    assert generated(engine) == generated(on_processor(args_for(found.path), found))
    assert calls and set(calls) <= {4, 8, 12}
