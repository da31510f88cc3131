"""What this machine can do at most: its matrix rate and how fast it reads memory.

    pagedattn bench ceilings

Measures the same products and reads as a step's, in a way that nothing else is in:
the floors of a profile are taken from these. Knows torch and a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from pagedattn.model.linear import Linear

ROUNDS = 5  # the best counts: others were disturbed


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of one machine with the threads that it was measured with."""

    gflops: float  # float32 product of 512 rows by a packed 1536 × 1536 weight
    cached_gbps: float  # reading 8 MB over and over
    read_gbps: float  # reading 512 MB
    copy_gbps: float  # read and written bytes of copying 256 MB
    threads: int

    def floor(self, flops: float, bytes: float) -> float:
        """The least seconds for so much arithmetic and so many bytes of memory."""
        return max(flops / (self.gflops * 1e9), bytes / (self.read_gbps * 1e9))

    def lines(self) -> str:
        """The rates as text."""
        return "\n".join(
            f"{name:14}{value:8.1f}" for name, value in asdict(self).items()
        )


def measure() -> Ceilings:
    """Measure this machine; takes two or three seconds."""
    linear, x = Linear(torch.randn(1536, 1536)), torch.randn(512, 1536)
    small, large = torch.ones(2 << 20), torch.ones(128 << 20)
    half = large[: 64 << 20]
    target = torch.empty_like(half)
    return Ceilings(
        gflops=2 * 512 * 1536**2 / _best(lambda: linear(x), 20) / 1e9,
        cached_gbps=small.nbytes / _best(small.sum, 50) / 1e9,
        read_gbps=large.nbytes / _best(large.sum, 1) / 1e9,
        copy_gbps=2 * half.nbytes / _best(lambda: target.copy_(half), 1) / 1e9,
        threads=torch.get_num_threads(),
    )


def _best(work: Callable[[], object], times: int) -> float:
    """Seconds of one call in the quickest of some rounds of `times` calls."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - start) / times)
    return min(rounds)
