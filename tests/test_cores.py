"""Threads bound to physical cores: which cores there are, and who sits where."""

import os
import threading
from pathlib import Path

import pytest
from pagedattn.kernels.threads import WORK_CALL, openmp_path

from pagedattn import LLM, EngineArgs
from pagedattn.assembly import assemble
from pagedattn.errors import UserError
from pagedattn.model import cores
from pagedattn.testing import make_tiny_model

linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads can't be bound here"
)
SIBLINGS = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 6: "6"}


@linux
def test_one_processor_of_each_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, siblings in SIBLINGS.items():
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(cores, "PROCESSORS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6, 7})
    assert cores.physical_cores() == [0, 1, 6, 7]  # of 7 nothing is known
    assert cores.cores_for(3) == [0, 1, 6]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    assert cores.physical_cores() == [4, 5]
    with pytest.raises(UserError, match="num_threads=3; this process may use 2"):
        cores.cores_for(3)


def test_where_threads_cannot_be_bound_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    folder = make_tiny_model(tmp_path)
    with pytest.raises(UserError, match="needs Linux") as refused:
        assemble(EngineArgs(str(folder), pin_threads=True))
    assert refused.value.param == "pin_threads"


def in_a_thread_of_its_own(work) -> None:
    """Run `work` where it can't bind the test's own threads."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def seats(threads: int) -> list[set[int]]:
    """The processors of each thread that the calling one computes with."""
    found = []
    cores.in_each_thread(
        WORK_CALL(lambda _: found.append(os.sched_getaffinity(0))), threads
    )
    return sorted(found, key=min)


@linux
def test_each_thread_has_a_core_and_keeps_it() -> None:
    wanted = cores.physical_cores()
    wanted = wanted if openmp_path() else wanted[:1]
    found = []

    def work() -> None:
        cores.pin_threads(wanted)
        found.append(seats(len(wanted)))
        cores.pin_threads([])
        found.append(seats(len(wanted)))

    in_a_thread_of_its_own(work)
    assert found == 2 * [[{core} for core in wanted]]
    assert len(os.sched_getaffinity(0)) >= len(wanted)


@linux
def test_the_thread_that_steps_is_bound(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    found = []

    def work() -> None:
        LLM(str(folder), pin_threads=True, num_threads=1, num_gpu_blocks_override=50)
        found.append(os.sched_getaffinity(0))

    in_a_thread_of_its_own(work)
    assert found == [set(cores.physical_cores()[:1])]
