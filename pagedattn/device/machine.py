"""What the runner asks of a device: memory, copies, work in order, marks, recordings.

A device does what it is told in the order it was told, later; only `wait` makes the
host wait. `Host` is the processor itself, which has nothing to wait for: the same
runner runs on it. The card stands in `cuda`. Chapter 07 reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Body = Callable[[], None]


class Machine(Protocol):
    """A device that works by itself, in order."""

    device: torch.device

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to by itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy when its turn comes; the source must stay as it is until then."""

    def run(self, body: Body) -> None:
        """Do `body`'s work on device tensors when its turn comes."""

    def record(self, body: Body) -> Body:
        """Record `body`'s work, doing none of it; `run` of the result does it."""

    def mark(self) -> Any:
        """A mark behind everything told so far."""

    def wait(self, mark: Any) -> None:
        """Make the host wait until the device has passed the mark."""


class Host:
    """The processor: everything is done at once, and a recording is the body itself."""

    device = torch.device("cpu")

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def run(self, body: Body) -> None:
        """Do it now."""
        body()

    def record(self, body: Body) -> Body:
        """The body itself."""
        return body

    def mark(self) -> None:
        """Nothing is ever behind."""

    def wait(self, mark: None) -> None:
        """Nothing to wait for."""
