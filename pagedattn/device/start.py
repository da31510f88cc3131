"""A runner on a card, from loaded weights: measured, given its KV pool, recorded.

The order matters: the largest step runs once with a small pool, so that what
is free afterwards is the pool's; kernels choose their configurations before anything
is recorded. Knows no CUDA: it is tested with a device that isn't there. Chapter 07
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedattn.cache.tables import LayerGroup
from pagedattn.device.buckets import Buckets, Shape, Way
from pagedattn.device.machine import Machine
from pagedattn.device.memory import Profile, kv_bytes
from pagedattn.device.runner import DeviceRunner, Limits
from pagedattn.runner import NewCache

TYPICAL = 2048  # tokens of context for which kernels choose how to compile
SMALL = 512  # blocks of the pool with which a start measures
Progress = Callable[[int, int], None]


class Card(Machine, Protocol):
    """A machine whose memory can be asked for."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def settle(self) -> None:
        """Count from here."""

    def transient(self) -> int:
        """Bytes in use at the peak since `settle`, and no more."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Running out of memory meanwhile says what to lower."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner is made of, but for its caches. `cache_shape` is one block's, of
    keys or of values: (kv_heads, block_size, head_dim)."""

    model: Any
    kernels: ModuleType | object
    groups: Sequence[LayerGroup]
    cache_shape: tuple[int, int, int]
    dtype: torch.dtype
    limits: Limits
    buckets: Buckets
    cascade: bool = False


def new_cache(parts: Parts, card: Machine, num_blocks: int) -> NewCache:
    """What makes one layer's keys and values, so many blocks, on the device."""

    def make() -> tuple[Tensor, Tensor]:
        shape = (num_blocks, *parts.cache_shape)
        k, v = (
            torch.zeros(shape, dtype=parts.dtype, device=card.device) for _ in range(2)
        )
        return k, v

    return make


def runner_of(parts: Parts, card: Machine, num_blocks: int) -> DeviceRunner:
    """A runner with a KV pool of so many blocks."""
    return DeviceRunner(
        parts.model,
        parts.kernels,
        card,
        parts.groups,
        parts.cache_shape[1],
        new_cache(parts, card, num_blocks),
        parts.limits,
        parts.buckets,
        parts.cascade,
    )


def measure(parts: Parts, card: Card, before: int) -> Profile:
    """Run the largest steps; what they took. `before`: bytes free before weights came.

    Once of nothing but single tokens, once of as many tokens as a step may have.
    """
    with card.stage("profile"):
        small = runner_of(parts, card, SMALL)
        card.settle()
        rehearse(parts, small, parts.buckets.widths[-1:])
        transient = card.transient()
    del small
    card.settle()
    free, total = card.memory()
    return Profile(total, before, free, transient)


def room_for_kv(parts: Parts, card: Card, before: int, share: float) -> int:
    """Bytes for the KV pool, measured."""
    ways = [way for _, way in parts.buckets.shapes()]
    cut = ways.count(Way.PIECES)
    pieces = cut * (sum(len(group.layers) for group in parts.groups) + 1)
    profile = measure(parts, card, before)
    return kv_bytes(profile, share, len(ways) - cut, pieces)


def start(
    parts: Parts, card: Card, num_blocks: int, progress: Progress | None = None
) -> DeviceRunner:
    """The runner, its pool taken, every kernel compiled and every shape recorded."""
    with card.stage("cache"):
        runner = runner_of(parts, card, num_blocks)
    with card.stage("profile"):
        rehearse(parts, runner, parts.buckets.widths)
    with card.stage("capture"):
        runner.record(context_of(parts), progress)
    return runner


def rehearse(parts: Parts, runner: DeviceRunner, widths: Sequence[int]) -> None:
    """Run the largest steps: of single tokens with tables of every width, and of as
    many tokens as a step may have, and of contexts that begin alike."""
    limits, context = parts.limits, context_of(parts)
    for width in widths:
        runner.rehearse(Shape(limits.seqs, limits.seqs, width), context)
    runner.rehearse(Shape(limits.tokens, limits.seqs, widths[-1]), context)
    if parts.cascade:
        shared = (context - 1) // runner.block_size * runner.block_size
        shape = Shape(limits.seqs, limits.seqs, widths[-1])
        runner.rehearse(shape, context, shared=shared)


def context_of(parts: Parts) -> int:
    """A typical length of context, where the model may have such a one."""
    return min(TYPICAL, parts.buckets.widths[-1] * parts.cache_shape[1])
