"""Starting Triton kernels: listed configurations, the choice among them, the cache.

It knows devices, files and clocks, and nothing of what a kernel computes. Tensors on
the "meta" device hold no numbers: a launch with them compiles and starts nothing, so
that whoever wants every kernel compiled calls it as the engine does (`report`).
"""

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.testing import do_bench

from ..cpu import cache_dir as cpu_cache_dir


@functools.cache
def cache_dir() -> Path:
    """Where compiled kernels and choices live: one folder per source and compiler."""
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    digest = hashlib.sha256("\0".join([*sources, triton.__version__]).encode())
    return cpu_cache_dir().parent / f"gpu-{digest.hexdigest()[:12]}"


@functools.cache
def use_cache_dir() -> None:
    """Triton keeps what it compiles in our folder, unless the user named another."""
    if "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(cache_dir())


@dataclass(frozen=True, slots=True)
class Config:
    """How to compile a kernel: sizes by name, warps, and loads in flight (stages)."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        sizes = (f"{name} {size}" for name, size in self.sizes.items())
        return ", ".join([*sizes, f"{self.warps} warps", f"{self.stages} stages"])


def launch(function: Any, grid: tuple[int, ...], config: Config, *args: Any) -> None:
    """Run `function` on a grid of programs; nothing where the grid is empty."""
    if math.prod(grid) == 0:
        return
    use_cache_dir()
    function.run(
        *args,
        grid=grid,
        warmup=_any_meta(args),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,  # a multiply-add rounds once
    )


def _any_meta(args: tuple[Any, ...]) -> bool:
    return any(_any_meta(a) if isinstance(a, tuple) else _is_meta(a) for a in args)


def _is_meta(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_meta


# Choosing. Only what may run twice is tuned: a kernel that reads what it overwrites
# has one configuration.
class Tuned:
    """A function of (config, *args), called without the first: the fastest listed one.

    `key(*args)` says for what the choice holds. It is measured on the first call with
    a key, on a GPU, and kept on disk for this GPU; elsewhere, and while a CUDA graph is
    recorded, an unmeasured key takes the first configuration.
    """

    def __init__(
        self,
        configs: tuple[Config, ...],
        key: Callable[..., tuple[Any, ...]],
        body: Callable[..., None],
    ) -> None:
        self.configs = configs
        self.key = key
        self.body = body
        functools.update_wrapper(self, body)

    def __call__(self, *args: Any) -> None:
        self.body(self.choose(*args), *args)

    def choose(self, *args: Any) -> Config:
        """The configuration for these arguments, measured if need be."""
        if not args[0].is_cuda or len(self.configs) == 1:
            return self.configs[0]
        choices = Choices.of(torch.cuda.get_device_name(args[0].device))
        key = " ".join(map(str, (self.body.__name__, *self.key(*args))))
        if key not in choices.known:
            if torch.cuda.is_current_stream_capturing():
                return self.configs[0]
            choices.add(key, self.fastest(*args))
        return self.configs[choices.known[key]]

    def fastest(self, *args: Any) -> int:
        """Which configuration is fastest here; one that does not fit is not."""

        def milliseconds(config: Config) -> float:
            try:
                return do_bench(lambda: self.body(config, *args), warmup=5, rep=20)
            except triton.OutOfResources:
                return math.inf

        times = [milliseconds(config) for config in self.configs]
        return times.index(min(times))


def tuned(
    *configs: Config, key: Callable[..., tuple[Any, ...]]
) -> Callable[[Callable[..., None]], Tuned]:
    """Decorate a function of (config, *args) with its configurations."""
    return lambda body: Tuned(configs, key, body)


class Choices:
    """Numbers of chosen configurations by key, of one kind of GPU, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, int] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    @staticmethod
    @functools.cache
    def of(device: str) -> "Choices":
        """Those of a GPU of this name, read once a process."""
        return Choices(cache_dir() / f"{device.replace(' ', '-')}.json")

    def add(self, key: str, number: int) -> None:
        """Remember one more, on disk too: the file is whole at every moment."""
        self.known[key] = number
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, delete=False
        ) as file:
            json.dump(self.known, file, indent=1)
        os.replace(file.name, self.path)
