"""`pagedattn bench gpu`: every kernel checked and timed on a card, then the engine.

Minutes on one card, with no network: weights are random, in the shape of Qwen3-8B.
Without a card it refuses. Knows the order of things; problems and arithmetic stand in
`gpu_kernels` and `gpu_report`.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from pagedattn.assembly import block_bytes, on_card
from pagedattn.bench.gpu_kernels import (
    TO_CHECK,
    TO_TIME,
    check,
    problems,
    timed,
)
from pagedattn.bench.gpu_report import (
    CardFacts,
    Decode,
    Found,
    busy_share,
    kernel_lines,
)
from pagedattn.cache.tables import group_layers
from pagedattn.config import EngineArgs
from pagedattn.device.cuda import Cuda
from pagedattn.device.memory import SHARE, check_free
from pagedattn.engine import Engine
from pagedattn.intake import Intake
from pagedattn.metrics import Metrics
from pagedattn.model import loader
from pagedattn.model.decoder import Decoder
from pagedattn.model.families import decoder_config
from pagedattn.pipeline import PipelinedEngine
from pagedattn.request import SamplingParams

BATCHES = (1, 8, 64, 256)
PROMPT, CONTEXT, STEPS = 8192, 512, 64
WATCHED = 8  # steps whose kernels are listed
SHAPE = {  # Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


class RandomWeights(loader.Weights):
    """Weights of any name and shape, drawn where they are wanted: norms are 1."""

    def __init__(self, placement: loader.Placement) -> None:
        super().__init__(
            SimpleNamespace(keys=(), key=lambda name: name), None, placement
        )

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        """A weight of that shape."""
        like = dict(device=self.placement.device, dtype=self.placement.dtype)
        if len(shape) == 1:
            return torch.ones(shape, **like)
        return torch.empty(shape, **like).normal_(0, shape[1] ** -0.5)


def random_model(
    shape: dict[str, Any], kernels: Any, placement: Any, length: int
) -> Any:
    """A decoder of that configuration with random weights."""
    config = decoder_config(shape)
    return loader.build(config, RandomWeights(placement), kernels, length)


def bare_engine(kind: type[Engine], model: Any, parts: tuple[Any, Any, Any]) -> Engine:
    """Token ids in and out, around (config, scheduler, runner)."""
    config, scheduler, runner = parts
    capacity = scheduler.tables.capacity()
    intake = Intake(config, capacity, model.spec.vocab_size, (), None)
    metrics = Metrics("random", config.max_model_len, {})
    return kind(config, scheduler, runner, intake, metrics)


# What is asked of an engine; any engine, so that this is tried without a card.
def decode_seconds(
    engine: Engine,
    batch: int,
    context: int,
    steps: int,
    clock: Callable[[], float],
    watch: Callable[[Callable[[], None]], float | None] | None = None,
) -> tuple[float, float | None]:
    """(seconds, busy): of one step in which `batch` sequences decode, the mean of
    `steps`; and what `watch` says of some steps after those, which it may slow down."""
    most = steps + context + WATCHED  # the first have begun while others' prompts come
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    for i in range(batch):
        prompt = [(i * 7919 + j) % 1000 for j in range(context)]
        engine.add_request(f"decode-{batch}-{i}", prompt, params)
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step()}
    engine.step()
    begin = clock()
    for _ in range(steps):
        engine.step()
    seconds = (clock() - begin) / steps
    busy = None if watch is None else watch(lambda: steps_of(engine, WATCHED))
    for request_id in started:
        engine.abort_request(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds, busy


def steps_of(engine: Engine, count: int) -> None:
    """So many steps."""
    for _ in range(count):
        engine.step()


def first_token(
    engine: Engine, name: str, prompt: Sequence[int], clock: Callable[[], float]
) -> float:
    """Seconds from a request's arrival to its first token, with nobody beside it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = clock()
    engine.add_request(name, list(prompt), params)
    while engine.has_unfinished_requests():
        engine.step()
    return clock() - begin


def step_bytes(model: Decoder, batch: int, context: int) -> float:
    """Bytes that a decode step has to read: weights but for the embedding's other rows,
    and keys and values of every context."""
    spec = model.spec
    weights = sum(
        linear.weight.nbytes
        for layer in model.layers
        for linear in (
            layer.attention.qkv,
            layer.attention.out,
            layer.mlp.gate_up,
            layer.mlp.down,
        )
    )
    groups = group_layers(spec.windows)
    token = block_bytes(groups, spec, 1, model.dtype.itemsize)
    return weights + model.head.weight.nbytes + batch * context * token


# On a card.
def run(progress: Callable[[str], None] = print) -> Found:
    """Everything; UserError without a card, or where it is taken."""
    card = Cuda()
    free, total = card.memory()
    check_free(total, free, SHARE)
    from pagedattn.kernels import gpu

    facts = card_facts(card)
    progress("checking kernels against float64")
    with torch.inference_mode():
        checks = [check(gpu, p) for p in problems(TO_CHECK, "cuda", torch.bfloat16)]
        progress("timing kernels")
        timings = [
            timed(gpu, p, on_device) for p in problems(TO_TIME, "cuda", torch.bfloat16)
        ]
    # Said now: what comes may fail, or be ended.
    progress("\n".join(kernel_lines(facts, checks, timings)))
    card.settle()
    progress("building a model in the shape of Qwen3-8B")
    placement = loader.Placement(card.device, torch.bfloat16)
    length = PROMPT + 2 * CONTEXT
    with torch.inference_mode():
        model = random_model(SHAPE, gpu, placement, length)
    args = EngineArgs(
        max_model_len=length,
        max_num_seqs=max(BATCHES),
        cudagraph_capture_sizes=list(BATCHES),
    )
    engine = bare_engine(PipelinedEngine, model, on_card(args, model, gpu, card, free))
    return Found(facts, checks, timings, *measured(engine, model, progress))


def measured(
    engine: Engine, model: Any, progress: Callable[[str], None]
) -> tuple[list[Decode], int, float, float]:
    """(decodes, prompt, ttft, ttft with a hit) of an engine on a card."""
    clock, decodes = time.perf_counter, []
    prompt = [(j * 31) % 1000 for j in range(PROMPT)]
    first_token(engine, "warm", prompt[::-1], clock)
    ttft = first_token(engine, "new", prompt, clock)
    hit = first_token(engine, "again", prompt, clock)
    for graphs in (True, False):
        for batch in BATCHES:
            progress(f"decode, batch {batch}, graphs {'on' if graphs else 'off'}")
            recorded = engine.runner.recorded
            engine.runner.recorded = recorded if graphs else {}
            seconds, busy = decode_seconds(
                engine, batch, CONTEXT, STEPS, clock, busy_on_device
            )
            engine.runner.recorded = recorded
            context = CONTEXT + STEPS // 2
            size = step_bytes(model, batch, context)
            decodes.append(Decode(batch, context, graphs, seconds, size, busy))
    return decodes, PROMPT, ttft, hit


def on_device(work: Callable[[], Any]) -> float:
    """Seconds of a call on the card, the median, its second-level cache cold."""
    from triton.testing import do_bench

    return do_bench(work, warmup=10, rep=50, return_mode="median") / 1e3


def busy_on_device(work: Callable[[], None]) -> float | None:
    """The share of the card's time in which a kernel ran, the copies between them
    counted as such; None where CUDA's profiler may not be used here."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return busy_share(device_spans(seen.events()))


def device_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(begin, end) of what ran on a device; not of the ranges that enclose it."""
    return [
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]


CUBE = 8192  # rows and columns of the product that gives the matrix rate


def card_facts(card: Cuda) -> CardFacts:
    """The card's name and rates, and what drives it."""
    import triton

    source = torch.ones(1 << 30, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    a = torch.randn(CUBE, CUBE, device=card.device, dtype=torch.bfloat16)
    copy = on_device(lambda: target.copy_(source))
    product = on_device(lambda: a @ a)
    return CardFacts(
        card.name,
        driver_version(),
        torch.__version__,
        triton.__version__,
        datetime.date.today().isoformat(),
        2 * source.nbytes / copy,
        2 * CUBE**3 / product,
    )


def driver_version() -> str:
    """The driver's version, as the system tells it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
