"""`EngineArgs` -> a running `Engine`: model found, loaded, sized, and put together.

The order matters: what can be refused cheaply is refused before weights are read,
and the KV pool takes its share of what memory is left after them. Built in chapter
09.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from tqdm import tqdm

from pagedattn.cache.tables import LayerGroup, group_layers
from pagedattn.config import EngineArgs, EngineConfig
from pagedattn.device.buckets import (
    Buckets,
    capture_sizes,
    checked_mode,
    table_widths,
)
from pagedattn.device.cuda import Cuda, choose_device
from pagedattn.device.memory import SHARE, check_free
from pagedattn.device.runner import DeviceRunner, Limits
from pagedattn.device.start import Card, Parts, room_for_kv, start
from pagedattn.engine import Engine
from pagedattn.errors import UserError
from pagedattn.intake import Intake
from pagedattn.kernels import cpu
from pagedattn.kernels.threads import openmp_path
from pagedattn.metrics import Metrics
from pagedattn.model import loader, source
from pagedattn.model.cores import cores_for
from pagedattn.model.decoder import Decoder, ModelSpec
from pagedattn.model.gguf import read_metadata
from pagedattn.model.linear import linear_backend, measured_knee
from pagedattn.model.pooling import Pooling, read_pooling
from pagedattn.model.source import Source
from pagedattn.model.tokenizer import read_tokenizer
from pagedattn.pipeline import PipelinedEngine
from pagedattn.request import SamplingParams
from pagedattn.runner import Runner
from pagedattn.sampling.grammar import Grammars
from pagedattn.scheduler import Scheduler
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

FLOAT_BYTES = 4
CARD_BUDGET = 8192  # tokens of a step on a GPU, where nothing else is said
DTYPES = {
    **dict.fromkeys(("auto", "float32", "float"), torch.float32),
    **dict.fromkeys(("float16", "half"), torch.float16),
    "bfloat16": torch.bfloat16,
}
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Progress = Callable[[int, int], None]
SHORT_TURN = 0.0003  # seconds that a thread keeps the interpreter while others wait


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine and what surrounds it. `facts` are for the banner and the metrics;
    whoever steps the engine binds its threads to `cores` first, where there are any."""

    engine: Engine
    args: EngineArgs
    model_name: str
    spec: ModelSpec
    chat_template: ChatTemplate | None
    sampling_defaults: dict[str, Any]
    facts: dict[str, str]
    cores: Sequence[int] = ()
    pooling: Pooling | None = None  # how its hidden states become embeddings


def assemble(args: EngineArgs, show_progress: bool = False) -> Assembled:
    """Build everything that `args` asks for; UserError if it can't be done."""
    device = choose_device(args.device)
    if device == "cpu":
        _check_for_cpu(args)
    found = source.resolve(args.model, args.revision)
    words = source.resolve(args.tokenizer) if args.tokenizer else found
    pooling = causal_pooling(args, found)
    if device == "cuda":
        return _assemble_on_card(args, found, words, pooling, show_progress)
    spec = loader.model_spec(found)
    groups = group_layers(spec.windows)
    _plan_cache(args, spec, groups)  # refuses now what can't fit; sized again below
    threads = use_threads(args.num_threads)
    cores = cores_for(threads) if args.pin_threads else ()
    defaults = loader.generation_config(found)
    sampling = sampling_defaults(args, defaults)
    with _loading(), ThreadPoolExecutor(1) as other_core:
        # Weights leave the interpreter free, which tokenizer and kernels need.
        weights = other_core.submit(_load_weights, found, args, show_progress)
        tokenizer = load_tokenizer(words)
        _load_kernels(show_progress)
        model = weights.result()
    config, scheduler = _plan_cache(args, spec, groups, measured_knee())
    runner = Runner(model, groups, config.block_size, _new_cache(config, spec))
    facts = _facts(found, spec, config, groups, threads)
    joined = _Joined(args, found.name, spec, tokenizer, defaults, sampling, facts)
    return joined.assembled(Engine, config, scheduler, runner, cores, pooling)


@dataclass(frozen=True, slots=True)
class _Joined:
    """What an engine is put together from, whatever it runs on."""

    args: EngineArgs
    found_name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    defaults: dict[str, Any]
    sampling: dict[str, Any]
    facts: dict[str, str]

    def assembled(
        self,
        kind: type[Engine],
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        cores: Sequence[int] = (),
        pooling: Pooling | None = None,
    ) -> Assembled:
        """The engine of that kind, and what surrounds it."""
        name = (self.args.served_model_name or [self.found_name])[0]
        eos_ids = [*self.defaults["eos_token_id"], *_eos_of(self.tokenizer)]
        capacity = scheduler.tables.capacity()
        vocabulary, tokenizer = self.spec.vocab_size, self.tokenizer
        grammars = Grammars(
            tokenizer.pieces, tokenizer.special_ids, vocabulary, eos_ids
        )
        runner.grammars = grammars
        intake = Intake(
            config, capacity, vocabulary, eos_ids, tokenizer, grammars.check
        )
        metrics = Metrics(name, config.max_model_len, self.facts)
        engine = kind(config, scheduler, runner, intake, metrics, tokenizer)
        template = tokenizer.chat_template
        return Assembled(
            engine,
            self.args,
            name,
            self.spec,
            ChatTemplate(template) if template else None,
            self.sampling,
            self.facts,
            cores,
            pooling,
        )


# On a card: what was measured there decides how large the pool is.
def _check_for_cpu(args: EngineArgs) -> None:
    """UserError for what only a GPU can do."""
    if args.dtype in DTYPES and DTYPES[args.dtype] != torch.float32:
        raise UserError(
            f"dtype={args.dtype!r} needs device='cuda': CPU kernels compute in "
            "float32, whatever the file holds.",
            "dtype",
        )
    if args.async_scheduling:
        raise UserError(
            "async_scheduling needs device='cuda': a CPU does not run by itself.",
            "async_scheduling",
        )
    if not args.disable_cascade_attn:
        raise UserError(
            "disable_cascade_attn=False needs device='cuda': kernels for a CPU read a "
            "shared prefix from its caches.",
            "disable_cascade_attn",
        )


def dtype_on_card(wanted: str, stored: str | None) -> torch.dtype:
    """The dtype to compute in; auto: the file's own 16-bit float, else bfloat16."""
    if wanted != "auto":
        return DTYPES[wanted]
    return torch.float16 if stored == "float16" else torch.bfloat16


def _assemble_on_card(
    args: EngineArgs,
    found: Source,
    words: Source,
    pooling: Pooling | None,
    show_progress: bool,
) -> Assembled:
    from pagedattn.kernels import gpu

    card, share = Cuda(), args.gpu_memory_utilization or SHARE
    free, total = card.memory()
    check_free(total, free, share)
    buckets_of(args, Limits(2, 2), 2)  # refuses now what there isn't
    stored = loader.load_config(found)
    dtype = dtype_on_card(args.dtype, stored.get("dtype") or stored.get("torch_dtype"))
    tokenizer, defaults = load_tokenizer(words), loader.generation_config(found)
    sampling = sampling_defaults(args, defaults)
    with card.stage("load"), _bar("Weights", show_progress) as progress:
        placement = loader.Placement(card.device, dtype)
        model = loader.load(found, gpu, args.max_model_len, progress, placement)
    with _bar("Graphs", show_progress) as progress:
        config, scheduler, runner = on_card(args, model, gpu, card, free, progress)
    facts = _facts_on_card(found, model, config, card, runner)
    joined = _Joined(args, found.name, model.spec, tokenizer, defaults, sampling, facts)
    kind = Engine if args.async_scheduling is False else PipelinedEngine
    return joined.assembled(kind, config, scheduler, runner, pooling=pooling)


def buckets_of(args: EngineArgs, limits: Limits, max_model_len: int) -> Buckets:
    """The shapes to record; UserError for a mode that there isn't."""
    mode = checked_mode(args.cudagraph_mode, args.enforce_eager)
    widths = table_widths(max_model_len, args.block_size)
    if mode == "NONE":
        return Buckets((), widths)
    given, largest = args.cudagraph_capture_sizes, args.max_cudagraph_capture_size
    sizes = capture_sizes(limits.seqs, given, largest)
    if mode == "FULL_DECODE_ONLY":
        return Buckets(sizes, widths)
    tokens = capture_sizes(min(2 * limits.seqs, limits.tokens), given, largest)
    if mode == "PIECEWISE":
        return Buckets((), widths, tokens)
    return Buckets(sizes, widths, tokens, limits.seqs if mode == "FULL" else 0)


def on_card(
    args: EngineArgs,
    model: Decoder,
    kernels: Any,
    card: Card,
    before: int,
    progress: Progress | None = None,
) -> tuple[EngineConfig, Scheduler, DeviceRunner]:
    """Measure the card, take a KV pool of what remains, and record the graphs.

    `before`: bytes that were free before the weights came.
    """
    spec = model.spec
    groups = group_layers(spec.windows)
    draft = replace(args, num_gpu_blocks_override=2)
    draft = draft.settle(spec.max_model_len, 1, 1, len(groups), CARD_BUDGET)
    sizes = draft.max_num_batched_tokens, draft.max_num_seqs, draft.max_model_len
    limits = Limits.of(*sizes)
    parts = Parts(
        model,
        kernels,
        groups,
        (spec.kv_heads, args.block_size, spec.head_dim),
        model.dtype,
        limits,
        buckets_of(args, limits, draft.max_model_len),
        not args.disable_cascade_attn,
    )
    if args.kv_cache_memory_bytes is None and args.num_gpu_blocks_override is None:
        share = args.gpu_memory_utilization or SHARE
        size = room_for_kv(parts, card, before, share)
        args = replace(args, kv_cache_memory_bytes=size)
    itemsize = model.dtype.itemsize
    config, scheduler = _plan_cache(args, spec, groups, CARD_BUDGET, itemsize)
    return config, scheduler, start(parts, card, config.num_blocks, progress)


def _facts_on_card(
    found: Source,
    model: Decoder,
    config: EngineConfig,
    card: Cuda,
    runner: DeviceRunner,
) -> dict[str, str]:
    groups, spec = group_layers(model.spec.windows), model.spec
    per_block = block_bytes(groups, spec, config.block_size, model.dtype.itemsize)
    sizes = runner.buckets.sizes or runner.buckets.tokens
    return _sizes(found, spec, config, per_block) | {
        "device": card.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "linear": "cuBLAS",
        "threads": str(torch.get_num_threads()),
        "kernels": "Triton",
        "cudagraph_capture_sizes": ", ".join(map(str, sizes)) or "none",
    }


def causal_pooling(args: EngineArgs, found: Source) -> Pooling | None:
    """How a causal model's hidden states become embeddings, None if they never do."""
    folder = found.path if found.kind == "hf" else None
    pooling = read_pooling(folder, "LAST", args.pooler_config)
    if args.convert != "none":
        return pooling
    if args.runner == "pooling":
        raise UserError("--runner pooling needs --convert auto or embed.", "convert")
    return None


@contextmanager
def _loading() -> Iterator[None]:
    """Set the interpreter for making what stays, in two threads.

    The collector would look through a million new objects again and again and find no
    garbage, 0.4 s of a start. Threads that pass the interpreter to and fro wait for
    the other's turn each time, 5 ms by default.
    """
    collects, turn = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SHORT_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(turn)
        if collects:
            gc.enable()


def _load_weights(found: Source, args: EngineArgs, show_progress: bool) -> Decoder:
    with _bar("Weights", show_progress) as progress:
        return loader.load(found, cpu, args.max_model_len, progress)


def _load_kernels(show_progress: bool) -> None:
    with _bar("Kernels", show_progress) as progress:
        cpu.compile_all(lambda name, done, total: progress(done, total))


def load_tokenizer(found: Source) -> Tokenizer:
    """The tokenizer that lies in a folder or a GGUF file."""
    if found.kind == "gguf":
        return Tokenizer.from_gguf(read_metadata(found.path))
    return read_tokenizer(found.path)


def _eos_of(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def sampling_defaults(args: EngineArgs, model: dict[str, Any]) -> dict[str, Any]:
    """What a caller's silence means: the model's own defaults and the overrides.

    Raises UserError now, not at the first request, if they are no valid values.
    """
    chosen = model if args.generation_config == "auto" else {}
    chosen = chosen | _checked_override(args.override_generation_config or {})
    defaults = {k: chosen[k] for k in SAMPLING_DEFAULTS if chosen.get(k) is not None}
    if chosen.get("max_new_tokens") is not None:
        defaults["max_tokens"] = chosen["max_new_tokens"]
    if chosen.get("do_sample") is False and "temperature" not in defaults:
        defaults["temperature"] = 0.0
    SamplingParams(**defaults)
    return defaults


def _checked_override(given: Any) -> dict[str, Any]:
    known = {*SAMPLING_DEFAULTS, "max_new_tokens", "do_sample"}
    if not isinstance(given, dict) or given.keys() - known:
        raise UserError(
            "override_generation_config must be an object of "
            f"{', '.join(sorted(known))}; got {given!r}.",
            "override_generation_config",
        )
    return given


def use_threads(wanted: int | None) -> int:
    """Set the threads of the one pool there is; the physical cores by default."""
    usable = len(psutil.Process().cpu_affinity()) if _has_affinity() else None
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    threads = wanted or min(cores, usable or cores)
    cpu.set_num_threads(threads)
    return threads


def _has_affinity() -> bool:
    return hasattr(psutil.Process, "cpu_affinity")  # not on macOS


# The KV pool: as many blocks as fit, and a context length that fits them.
def block_bytes(
    groups: Sequence[LayerGroup],
    spec: ModelSpec,
    block_size: int,
    itemsize: int = FLOAT_BYTES,
) -> int:
    """Bytes of one block: keys and values of every layer in a group."""
    layers = max(len(group.layers) for group in groups)
    return layers * 2 * spec.kv_heads * block_size * spec.head_dim * itemsize


def _plan_cache(
    args: EngineArgs,
    spec: ModelSpec,
    groups: Sequence[LayerGroup],
    knee: int = 1,
    itemsize: int = FLOAT_BYTES,
) -> tuple[EngineConfig, Scheduler]:
    free = psutil.virtual_memory().available
    per_block = block_bytes(groups, spec, args.block_size, itemsize)
    config = args.settle(spec.max_model_len, per_block, free, len(groups), knee)
    capacity = Scheduler(config, groups).tables.capacity()
    config = fit_length(args, config, capacity)
    return config, Scheduler(config, groups)


def fit_length(args: EngineArgs, config: EngineConfig, capacity: int) -> EngineConfig:
    """`config` with a context length that one request alone can reach.

    A length that was asked for and doesn't fit is refused; an automatic one is
    lowered.
    """
    if config.max_model_len <= capacity:
        return config
    if args.max_model_len is not None:
        raise UserError(
            f"max_model_len={config.max_model_len} does not fit: the KV pool has "
            f"{config.num_blocks - 1} blocks of {config.block_size} tokens, enough for "
            f"{capacity} tokens of one request. Raise kv_cache_memory_bytes or lower "
            "max_model_len.",
            "max_model_len",
        )
    return replace(config, max_model_len=capacity)


def _new_cache(
    config: EngineConfig, spec: ModelSpec
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def new_cache() -> tuple[torch.Tensor, torch.Tensor]:
        return cpu.empty_kv(
            config.num_blocks,
            spec.kv_heads,
            config.block_size,
            spec.head_dim,
            torch.float32,
        )

    return new_cache


def _facts(
    found: Source,
    spec: ModelSpec,
    config: EngineConfig,
    groups: Sequence[LayerGroup],
    threads: int,
) -> dict[str, str]:
    per_block = block_bytes(groups, spec, config.block_size)
    return _sizes(found, spec, config, per_block) | {
        "dtype": "float32 (what CPU kernels compute in, whatever the file holds)",
        "linear": linear_backend(),
        "threads": str(threads),
        "kernels": "numba" if openmp_path() else "numba, 1 thread: no OpenMP found",
    }


def _sizes(
    found: Source, spec: ModelSpec, config: EngineConfig, per_block: int
) -> dict[str, str]:
    return {
        "model": found.name,
        "architecture": spec.architecture,
        "num_gpu_blocks": str(config.num_blocks - 1),
        "block_size": str(config.block_size),
        "kv_cache_bytes": str(per_block * config.num_blocks),
        "max_model_len": str(config.max_model_len),
        "max_num_seqs": str(config.max_num_seqs),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "enable_prefix_caching": str(config.prefix_caching),
    }


@contextmanager
def _bar(title: str, show: bool) -> Iterator[Progress]:
    with tqdm(desc=title, disable=not show, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
