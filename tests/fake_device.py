"""A device that isn't there: it does what it is told only when someone waits.

Work stands in a queue, in order, until the host waits for a mark behind it, so a test
sees what a real device might: inputs overwritten too early give wrong tokens. It counts
copies, launches, recordings and waits, and keeps an account of memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pagedattn.device.memory import out_of_memory


class FakeDevice:
    """A `Machine` and a `Card`, as lazy as a device may be."""

    device = torch.device("cpu")

    def __init__(self, free: int = 80 << 30, total: int = 100 << 30) -> None:
        self.queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.told = 0
        self.counts: Counter[str] = Counter()
        self.free, self.total = free, total
        self.taken = 0  # by the steps that ran
        self.fail_at: str | None = None  # a stage in which memory runs out
        self.reading: dict[int, Tensor] = {}  # sources of copies that have not run

    def _tell(self, body: Callable[[], None]) -> None:
        self.told += 1
        self.queue.append((self.told, body))

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), 77, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.counts["copy"] += 1
        self._tell(lambda: target.copy_(source))
        self.reading[self.told] = source

    def run(self, body: Callable[[], None]) -> None:
        self.counts["replay" if getattr(body, "recorded", False) else "run"] += 1
        self._tell(body)

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Nothing runs while it is recorded, as with CUDA."""
        assert not self.queue, "recorded while work was waiting"
        self.counts["record"] += 1

        def replay() -> None:
            body()

        replay.recorded = True
        return replay

    def mark(self) -> int:
        return self.told

    def wait(self, mark: int) -> None:
        """Drain the queue up to the mark, no further."""
        self.counts["wait"] += 1
        while self.queue and self.queue[0][0] <= mark:
            number, body = self.queue.popleft()
            self.reading.pop(number, None)
            body()

    def busy(self, buffer: Tensor) -> bool:
        """Whether a copy that has not run yet reads this memory."""
        start = buffer.untyped_storage().data_ptr()
        return any(
            s.untyped_storage().data_ptr() == start for s in self.reading.values()
        )

    # As a card.
    def memory(self) -> tuple[int, int]:
        return self.free - self.taken, self.total

    def settle(self) -> None:
        self.counts["settle"] += 1

    def transient(self) -> int:
        return 1 << 30

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if name == self.fail_at:
            raise out_of_memory(name, *self.memory())
        yield
