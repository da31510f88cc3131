"""`bench gpu` without a card: its problems in miniature under Triton's interpreter, its
questions to an engine, its arithmetic on made-up figures, its refusal."""

import json
from types import SimpleNamespace

import pytest
import torch
from pagedattn.kernels import spec
from torch.autograd import DeviceType

from pagedattn.bench import gpu as bench
from pagedattn.bench import gpu_report
from pagedattn.bench.gpu_report import CardFacts, Check, Decode, Found, Timing
from pagedattn.model.loader import Placement
from pagedattn.serve.cli import main
from pagedattn.testing import hash_engine, make_tiny_model

CARD = CardFacts("A card", "1.2", "2", "3", "2030-01-02", 4e12, 8e14)
TINY = bench.SHAPE | dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def made_up(**changes):
    figures = dict(
        card=CARD,
        checks=[Check("norm", 1e-3, 1e-2), Check("other", float("nan"), 1.0)],
        timings=[
            Timing("decode_attention", "64 x 4096", 1e-3, 3.6e9, 1e9, "SDPA", 2e-3),
            Timing("prefill_attention", "1 x 8192", 1e-3, 1e6, 4e11),
            Timing("rms_norm", "8 rows", 1e-6, 2e6),
        ],
        decodes=[
            Decode(1, 500, True, 5e-3, 16e9, 0.97),
            Decode(64, 500, True, 1e-2, 2e10, 0.9),
            Decode(256, 500, True, 2e-2, 3e10),
            Decode(1, 500, False, 1e-2, 16e9),
        ],
        prompt=8192,
        ttft=0.5,
        ttft_hit=0.01,
    )
    return Found(**(figures | changes))


def test_a_floor_is_bytes_or_arithmetic_whichever_takes_longer():
    decode, prefill, norm = made_up().timings
    assert decode.floor(CARD) == pytest.approx(0.9e-3)
    assert prefill.floor(CARD) == pytest.approx(0.5e-3)
    assert norm.share(CARD) == pytest.approx(0.5)


def test_targets_are_the_issues_and_those_missed_say_so():
    found = made_up()
    rows = {what: (wanted, reached) for what, wanted, reached in found.targets()}
    assert rows["decode_attention (64 x 4096)"] == (0.8, pytest.approx(0.9))
    assert rows["prefill_attention (1 x 8192)"] == (0.6, pytest.approx(0.5))
    assert rows["decode step, batch 1"] == (0.75, pytest.approx(0.8))
    assert rows["decode step, batch 64"] == (0.75, pytest.approx(0.5))
    assert rows["kernels' share of a step, batch 64"] == (0.95, 0.9)
    assert len(rows) == 6  # neither batch 256 nor eager steps have a target
    table = found.table()
    assert table.count("MISSED") == 3 and table.count("reached") == 3
    assert "launch gaps 3.0%" in table and table.count("not measured") == 2
    assert "SDPA 2000 us" in table and "WRONG" in table
    early = gpu_report.kernel_lines(CARD, found.checks, found.timings)
    assert len(early) == 2 + 2 + 3 and table.startswith("\n".join(early))


def test_one_json_and_one_picture(tmp_path):
    data, picture = gpu_report.write(made_up(), tmp_path / "new")
    said = json.loads(data.read_text())
    assert said["card"]["name"] == "A card" and said["card"]["driver"] == "1.2"
    assert [c["passed"] for c in said["checks"]] == [True, False]
    assert said["prefill"]["tokens_per_second"] == pytest.approx(16384)
    assert said["decode"][1]["tokens_per_second"] == pytest.approx(6400)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_launch_gaps_are_what_no_kernel_covers():
    share = gpu_report.busy_share
    assert share([]) is None and share([(1.0, 1.0)]) is None
    assert share([(3.0, 4.0), (0.0, 1.0)]) == pytest.approx(0.5)
    # Overlapping, nested and adjoining ones count once.
    assert share([(0, 4), (1, 2), (3, 5), (5, 6), (8, 10)]) == pytest.approx(0.8)


def test_only_what_ran_on_the_device_is_counted():
    def event(device, begin, end, annotation=False):
        span = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(
            device_type=device, time_range=span, is_user_annotation=annotation
        )

    card, host = DeviceType.CUDA, DeviceType.CPU
    events = [event(card, 1, 2), event(host, 0, 9), event(card, 0, 9, True)]
    assert bench.device_spans(events) == [(1, 2)]


def test_events_have_what_is_read_of_them():
    """This torch's own profiler, as far as a machine without a card shows it."""
    with torch.profiler.profile() as seen:
        torch.ones(3) + 1
    assert seen.events() and bench.device_spans(seen.events()) == []


class Ticks:
    """A clock that a step moves by one."""

    def __init__(self, engine):
        self.now, step = 0.0, engine.step

        def counted():
            self.now += 1
            return step()

        engine.step = counted

    def __call__(self):
        return self.now


def test_decode_is_timed_while_every_sequence_decodes():
    engine = hash_engine(num_blocks=400, max_num_batched_tokens=32)
    clock, seen, run = Ticks(engine), [], engine.runner.run

    def watched(plan):
        seen.append([len(item.tokens) for item in plan.items])
        return run(plan)

    engine.runner.run = watched
    asked = []

    def watch(work):
        before = len(seen)
        work()
        asked.append(seen[before:])
        return 0.5

    assert bench.decode_seconds(engine, 6, 20, 8, clock) == (1.0, None)
    assert bench.decode_seconds(engine, 6, 20, 8, clock, watch) == (1.0, 0.5)
    assert asked == [[[1] * 6] * bench.WATCHED]
    assert seen[-8:] == [[1] * 6] * 8
    engine.check()  # nothing is left behind


def test_a_prefix_hit_is_a_first_token_sooner():
    engine = hash_engine(num_blocks=100, max_num_batched_tokens=16)
    clock, prompt = Ticks(engine), list(range(160))
    assert bench.first_token(engine, "new", prompt, clock) == 10
    assert bench.first_token(engine, "again", prompt, clock) == 1


def test_a_step_reads_weights_once_and_every_context():
    model = bench.random_model(TINY, spec, Placement(), 64)
    layer = 32 * (64 + 32 + 32) + 64 * 32 + 32 * 96 + 48 * 32
    weights = 4 * (2 * layer + 64 * 32)
    assert bench.step_bytes(model, 3, 10) == weights + 30 * 2 * 2 * 2 * 16 * 4
    assert len(model.layers) == 2 and model.layers[0].attention.q_norm is not None


def test_without_a_card_it_refuses(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    assert "device='cuda' cannot be used" in capsys.readouterr().err


def test_kernels_are_compiled_for_the_model_that_is_named(tmp_path):
    from pagedattn.serve.cli import _sizes_of

    found = _sizes_of(str(make_tiny_model(tmp_path / "m")))
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 8)
    assert (found.hidden, found.width, found.vocab) == (32, 64, 260)
    assert found.dtype == torch.bfloat16


pytest.importorskip("triton", reason="Triton is for Linux")

from pagedattn.kernels import gpu  # noqa: E402

from pagedattn.bench import gpu_kernels  # noqa: E402

SMALL = gpu_kernels.Sizes(4, 2, 16, 32, 64, 50, seqs=2, context=40, prompt=20, block=4)
NAMES = {
    *("decode_attention", "prefill_attention", "cascade_attention"),
    *("write_kv", "rotary_write", "copy_blocks", "rms_norm", "add_rms_norm"),
    *("silu_mul", "gelu_tanh_mul", "grouped_linear", "sample", "penalize"),
}
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


@interpreted
def test_every_kernel_is_asked_and_right_in_miniature():
    names = set()
    for problem in gpu_kernels.problems(SMALL, "cpu", torch.float32):
        found = gpu_kernels.check(gpu, problem)
        assert found.passed, found
        assert problem.bytes > 0
        names.add(problem.name)
    assert names == NAMES


def test_a_wrong_kernel_is_found_out():
    """One number off, one number not written, one token another."""
    for problem in gpu_kernels.problems(SMALL, "cpu", torch.float32):

        def wrong(*args, problem=problem):
            getattr(spec, problem.name)(*args)
            args[problem.outs[-1]].view(-1)[-1] += 1

        def blank(*args, problem=problem):
            getattr(spec, problem.name)(*args)
            out = args[problem.outs[0]]
            out.view(-1)[0] = -1 if problem.exact else torch.nan

        for bad in (wrong, blank):
            kernels = SimpleNamespace(**{problem.name: bad})
            assert not gpu_kernels.check(kernels, problem).passed, problem.name


def test_peers_compute_the_same():
    """What torch is timed at is the same attention."""
    for problem in gpu_kernels.problems(SMALL, "cpu", torch.float32):
        if problem.other is not None:
            timing = gpu_kernels.timed(spec, problem, lambda work: (work(), 2.0)[1])
            assert timing.peer_seconds == 2.0 and timing.peer == problem.peer
