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
from pagedattn.model.source import Source
from pagedattn.model.tokenizer import read_tokenizer
from pagedattn.request import SamplingParams
from pagedattn.runner import Runner
from pagedattn.sampling.grammar import Grammars
from pagedattn.scheduler import Scheduler
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

FLOAT_BYTES = 4
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


def assemble(args: EngineArgs, show_progress: bool = False) -> Assembled:
    """Build everything that `args` asks for; UserError if it can't be done."""
    found = source.resolve(args.model, args.revision)
    words = source.resolve(args.tokenizer) if args.tokenizer else found
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
    eos_ids = [*defaults["eos_token_id"], *_eos_of(tokenizer)]
    grammars = Grammars(
        tokenizer.pieces, tokenizer.special_ids, spec.vocab_size, eos_ids
    )
    cache = _new_cache(config, spec)
    runner = Runner(model, groups, config.block_size, cache, grammars)
    name = (args.served_model_name or [found.name])[0]
    facts = _facts(found, spec, config, groups, threads)
    capacity = scheduler.tables.capacity()
    intake = Intake(
        config, capacity, spec.vocab_size, eos_ids, tokenizer, grammars.check
    )
    metrics = Metrics(name, config.max_model_len, facts)
    engine = Engine(config, scheduler, runner, intake, metrics, tokenizer)
    template = tokenizer.chat_template
    return Assembled(
        engine,
        args,
        name,
        spec,
        ChatTemplate(template) if template else None,
        sampling,
        facts,
        cores,
    )


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
def block_bytes(groups: Sequence[LayerGroup], spec: ModelSpec, block_size: int) -> int:
    """Bytes of one block: keys and values of every layer in a group."""
    layers = max(len(group.layers) for group in groups)
    return layers * 2 * spec.kv_heads * block_size * spec.head_dim * FLOAT_BYTES


def _plan_cache(
    args: EngineArgs, spec: ModelSpec, groups: Sequence[LayerGroup], knee: int = 1
) -> tuple[EngineConfig, Scheduler]:
    free = psutil.virtual_memory().available
    per_block = block_bytes(groups, spec, args.block_size)
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
    return {
        "model": found.name,
        "architecture": spec.architecture,
        "dtype": "float32 (what CPU kernels compute in, whatever the file holds)",
        "linear": linear_backend(),
        "threads": str(threads),
        "kernels": "numba" if openmp_path() else "numba, 1 thread: no OpenMP found",
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
