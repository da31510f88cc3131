"""CUDA as a machine: streams keep the order, events are marks, graphs are recordings.

Every call of torch.cuda stands here. It knows nothing of plans or models; without a
card, or without Triton, it says so. Chapter 07 reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from pagedattn.device.machine import Body
from pagedattn.device.memory import out_of_memory
from pagedattn.errors import UserError


def missing() -> str | None:
    """Why nothing can run on a card here; None where it can."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "torch finds no CUDA device" if built else "this torch has no CUDA"
        return f"{why} (torch {torch.__version__})"
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'pagedattn[gpu]'"
    return None


def choose_device(wanted: str) -> str:
    """ "cpu" or "cuda" for --device; UserError where a card is asked for in vain."""
    why = missing() if wanted != "cpu" else None
    if wanted == "cuda" and why is not None:
        raise UserError(
            f"device='cuda' cannot be used: {why}. device='cpu' runs here.", "device"
        )
    return "cuda" if wanted != "cpu" and why is None else "cpu"


class Cuda:
    """The current CUDA device. Work goes to the current stream of whoever calls."""

    def __init__(self) -> None:
        choose_device("cuda")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._pool: tuple[int, int] | None = None  # memory that recordings share

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that stays where it is, so that the card reads it by itself."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Behind what the stream has to do; the host goes on."""
        target.copy_(source, non_blocking=True)

    def run(self, body: Body) -> None:
        """Launch its kernels; they run behind what the stream has to do."""
        body()

    def record(self, body: Body) -> Body:
        """Its kernels as one CUDA graph; running that is one launch."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        ):
            body()
        return graph.replay

    def mark(self) -> torch.cuda.Event:
        """An event in the stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Until the stream has passed it."""
        mark.synchronize()

    # What a start asks.
    @property
    def name(self) -> str:
        """The card's name."""
        return torch.cuda.get_device_name(self.device)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the card, others' use counted."""
        return torch.cuda.mem_get_info(self.device)

    def settle(self) -> None:
        """Give back what torch keeps in reserve, and count peaks from here."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def transient(self) -> int:
        """Bytes that were in use at the peak since `settle`, and are no more."""
        peak = torch.cuda.max_memory_allocated(self.device)
        return peak - torch.cuda.memory_allocated(self.device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Running out of memory meanwhile becomes a UserError that says what to lower,
        for the stages of `memory.LOWER`."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = self.memory()
            raise out_of_memory(name, free, total) from error
