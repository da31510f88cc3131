"""Every kernel compiled for an architecture, and what the compiler says of it.

No GPU is needed: the functions are called as the engine calls them, with tensors that
hold no numbers, under a driver that knows an architecture and has no device. What is
compiled lands in the cache, where the engine finds it.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from . import attention, elementwise, experts, sampling, write
from .launch import Config, Tuned, use_cache_dir

KIB = 1024
# Shared memory that one program may have: CUDA's programming guide, compute capability.
SHARED = {
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * KIB),
    **dict.fromkeys(("sm_80", "sm_87"), 163 * KIB),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227 * KIB),
}
REGISTERS = 65536  # of a multiprocessor: a program whose threads want more can't start
EACH = 255  # registers that one thread can name


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled kernel: registers a thread, bytes of shared memory, bytes spilled.

    `config` is that of the function which started it.
    """

    kernel: str
    config: Config
    arch: str
    threads: int
    registers: int
    shared: int
    spilled: int

    @property
    def fits(self) -> bool:
        """Whether the hardware can start it."""
        held = self.registers <= EACH and self.registers * self.threads <= REGISTERS
        return held and self.shared <= SHARED[self.arch]


@dataclass(frozen=True, slots=True)
class Model:
    """What kernels are compiled for: the sizes of one model."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int  # of the MLP
    vocab: int
    softcap: float = 0.0
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def empty(self, *shape: int) -> Tensor:
        """A tensor without numbers, of the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device="meta")


MODELS = (Model(32, 8, 128, 4096, 12288, 151936),)  # Qwen3-8B
TOKENS = 64


def calls(model: Model) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Each function of this package, with arguments as such a model has them."""
    yield from attention_calls(model)
    yield from cache_calls(model)
    yield from sampling_calls(model)
    x = model.empty(TOKENS, model.hidden)
    weight, head = (  # norms' weights are float32, whatever the model computes in
        torch.empty(n, device="meta") for n in (model.hidden, model.head_dim)
    )
    gate_up, out = (
        model.empty(TOKENS, 2 * model.width),
        model.empty(TOKENS, model.width),
    )
    yield elementwise.rms_norm, (x, x, weight, 1e-6)
    q = heads_of(model)[0]
    yield elementwise.rms_norm, (q, q, head, 1e-6)
    yield elementwise.add_rms_norm, (x, x, x, weight, 1e-6)
    yield elementwise.silu_mul, (out, gate_up)
    yield elementwise.gelu_tanh_mul, (out, gate_up)
    weights = model.empty(8, model.width, model.hidden)
    yield experts.grouped_linear, (out, x, weights, whole(TOKENS), whole(9))


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Whole numbers that are not there."""
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_of(model: Model) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, one layer's cache): views of one product, as the decoder has them."""
    heads = [model.heads, model.kv_heads, model.kv_heads]
    fused = model.empty(TOKENS, sum(heads), model.head_dim)
    cache = model.empty(TOKENS, model.kv_heads, model.block_size, model.head_dim)
    return *fused.split(heads, dim=1), cache


def attention_calls(
    model: Model,
) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """The three kinds of attention."""
    q, _, _, cache = heads_of(model)
    out, kv = model.empty(*q.shape), (cache, cache)
    tables, lengths = (whole(*s, dtype=torch.int32) for s in ((TOKENS, 64), (TOKENS,)))
    ragged = tables, whole(TOKENS + 1, dtype=torch.int32), lengths
    softcap = model.softcap
    yield attention.decode_attention, (out, q, *kv, tables, lengths, 1.0, 0, softcap)
    yield attention.prefill_attention, (out, q, *kv, *ragged, 1.0, 0, softcap)
    yield attention.cascade_attention, (out, q, *kv, *ragged, 256, 1.0, softcap)


def cache_calls(
    model: Model,
) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """What turns heads and fills the cache."""
    q, k, v, cache = heads_of(model)
    cos_sin = torch.empty(TOKENS, model.head_dim, device="meta")
    turn, to = (whole(TOKENS), cos_sin), (cache, cache, whole(TOKENS))
    yield write.write_kv, (k, v, *to)
    yield write.rotary, (q, k, *turn)
    yield write.rotary_write, (q, k, v, *turn, *to)
    yield write.copy_blocks, (*to, whole(TOKENS))


def sampling_calls(
    model: Model,
) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """From logits to tokens."""
    logits = whole(TOKENS, model.vocab, dtype=torch.float32)
    single, double, small = (
        whole(TOKENS, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.int32)
    )
    ids, starts = whole(TOKENS), whole(TOKENS + 1)
    yield sampling.penalize, (logits, ids, ids, starts, single, double, double)
    yield sampling.sample, (ids, logits, single, small, double, single, double)


Job = tuple[Callable[..., None], Config, tuple[Any, ...]]


# Compiling: a driver without a device, and a listener at the compiler's door.
class NoDevice:
    """Stands in for CUDA's driver: it names an architecture, and can start nothing."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> "NoDevice":
        """The key of what Triton keeps in memory for a device: each report its own."""
        return self

    def get_current_stream(self, device: "NoDevice") -> int:
        """Asked for at every launch, used by none."""
        return 0


@contextmanager
def compiling_for(arch: str) -> Iterator[list[tuple[Any, dict[str, str]]]]:
    """Meanwhile launches compile for `arch`; gives what was compiled, in order."""
    found: list[tuple[Any, dict[str, str]]] = []

    def listen(
        *, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any
    ) -> None:
        found.append((metadata, metadata_group))

    use_cache_dir()
    before = driver._active  # reset_active() would look for a GPU
    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        driver.set_active(NoDevice(arch))
        try:
            yield found
        finally:
            driver.set_active(before)


def jobs(most: int | None = None, models: tuple[Model, ...] = MODELS) -> list[Job]:
    """Every function in each of its configurations, or in the first `most` of them."""
    return [
        (function, config, args)
        for model in models
        for function, args in calls(model)
        for config in configs_of(function)[:most]
    ]


def configs_of(function: Callable[..., None]) -> tuple[Config, ...]:
    """What a function may be compiled with: its list, or what all others use."""
    return function.configs if isinstance(function, Tuned) else (Config(),)


def compile_all(
    arch: str,
    progress: Callable[[str, int, int], None] | None = None,
    most: int | None = None,
    models: tuple[Model, ...] = MODELS,
) -> list[Row]:
    """Compile every kernel in every configuration, or in `most` of each function's;
    report (name, done, of).

    RuntimeError where the interpreter is on, which compiles nothing.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would not be compiled.")
    wanted = jobs(most, models)
    rows: list[Row] = []
    for done, (function, config, args) in enumerate(wanted):
        if progress:
            progress(function.__name__, done, len(wanted))
        with compiling_for(arch) as found:
            if isinstance(function, Tuned):
                function.body(config, *args)
            else:
                function(*args)
        rows += [row(config, arch, *one) for one in found]
    if progress:
        progress("", len(wanted), len(wanted))
    return rows


def row(config: Config, arch: str, metadata: Any, files: dict[str, str]) -> Row:
    """What the compiler's metadata and the code's own notes say."""
    code = next(path for name, path in files.items() if name.endswith(".cubin"))
    registers, spilled = resources(Path(code))
    return Row(
        metadata["name"],
        config,
        arch,
        32 * metadata["num_warps"],
        registers,
        metadata["shared"],
        spilled,
    )


def resources(cubin: Path) -> tuple[int, int]:
    """(registers a thread, bytes a thread keeps in memory for want of them)."""
    tool = knobs.nvidia.cuobjdump.path
    said = subprocess.run(
        [tool, "-res-usage", cubin], check=True, capture_output=True, text=True
    ).stdout
    found = {k: int(n) for k, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]
