"""Physical cores, and the threads that compute bound to them, one each.

Knows Linux's processor numbers and OpenMP's pool of threads; nothing of models.
Chapter 06 shows the pool.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from pagedattn.errors import UserError
from pagedattn.kernels.threads import FORK_CALL, WORK_CALL, openmp_path, serial_fork

PROCESSORS = Path("/sys/devices/system/cpu")


def physical_cores() -> list[int]:
    """One processor number for each physical core that this process may use.

    Raises UserError where the system can't bind a thread to a processor.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            "pin_threads needs Linux; this system can't bind a thread to a core.",
            "pin_threads",
        )
    first: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        siblings = PROCESSORS / f"cpu{number}/topology/thread_siblings_list"
        core = siblings.read_text().strip() if siblings.exists() else str(number)
        first.setdefault(core, number)
    return list(first.values())


def cores_for(threads: int) -> list[int]:
    """A core for each thread; UserError if there are fewer."""
    cores = physical_cores()
    if threads > len(cores):
        raise UserError(
            f"pin_threads needs a physical core for each of num_threads={threads}; "
            f"this process may use {len(cores)}.",
            "pin_threads",
        )
    return cores[:threads]


def pin_threads(cores: Sequence[int]) -> None:
    """Bind the calling thread and those that it computes with to `cores`, one each.

    OpenMP keeps a pool for each thread that starts loops, and uses the same threads
    while their number stays. So the thread that steps must call this, and what it
    starts later is bound as it is itself. No cores: nothing happens.
    """
    if not cores:
        return
    free = list(cores)

    @WORK_CALL
    def pin(_: int) -> None:  # once in each thread; pop is atomic
        os.sched_setaffinity(0, {free.pop()})

    in_each_thread(pin, len(cores))


def in_each_thread(work: ctypes._CFuncPtr, threads: int) -> None:
    """Call `work` once in each thread of the calling thread's pool."""
    path = openmp_path()
    fork = getattr(ctypes.CDLL(path), "GOMP_parallel", None) if path else None
    call = ctypes.cast(fork, FORK_CALL) if fork else serial_fork
    call(ctypes.cast(work, ctypes.c_void_p), None, threads, 0)
