"""The tools that make the book: listings, live proofs, weaving, pages, the site."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from nbformat import v4
from pagedattn.kernels import cpu, threads, tiles

import pagedattn.scheduler
from pagedattn.book import broken, falsify, holds, show
from pagedattn.book.source import ROOT, listing
from pagedattn.cache.blocks import Block, BlockPool
from pagedattn.scheduler import Scheduler

BOOK = Path(__file__).parents[1] / "book"
sys.path[:0] = [str(BOOK), str(BOOK / "site")]

import build  # noqa: E402
import pages  # noqa: E402
import weave  # noqa: E402


# Listings: the source as it stands, or an error.
@pytest.mark.parametrize(
    "thing",
    [
        *(BlockPool, BlockPool.grow, BlockPool.usable, Scheduler.plan, cpu.write_kv),
        *(cpu.exp, cpu.Kernel.compiled, tiles.prefetch),
    ],
)
def test_a_listing_is_what_stands_there(thing: Any) -> None:
    found = listing(thing)
    lines = (ROOT / found.file).read_text("utf-8").splitlines()
    shown = found.text.splitlines()
    there = lines[found.line - 1 : found.line - 1 + len(shown)]
    indent = len(there[0]) - len(there[0].lstrip())
    assert shown == [line[indent:] for line in there]
    assert found.names[0].split(".")[-1] in found.text


def test_a_class_shows_its_methods_a_section_its_own() -> None:
    assert "BlockPool.grow" in listing(BlockPool).names
    part = listing(Scheduler, "Preemption")
    assert part.names[0] == "Scheduler._make_room" and "def commit" not in part.text
    assert listing(cpu, "small functions").names == ("exp", "enough", "tanh")


def test_a_function_that_became_something_else_is_found_by_name() -> None:
    found = listing(threads, "serial_fork")
    assert found.names == ("serial_fork",) and found.text.startswith("@FORK_CALL\ndef ")


def test_what_is_gone_fails_loudly() -> None:
    with pytest.raises(LookupError, match="0 sections"):
        show(Scheduler, section="Nothing of the kind")
    with pytest.raises(LookupError, match="no function 'nothing'"):
        show(threads, section="nothing")
    with pytest.raises(TypeError, match="whole module"):
        listing(pagedattn.scheduler)
    with pytest.raises(TypeError, match="not this project's"):
        listing(Path)


# Live proofs.
def counts_agree(sizes: list[int]) -> None:
    pool = BlockPool(6, lambda block: None)
    held = [blocks for n in sizes if (blocks := pool.grow((), n)) is not None]
    pool.check(held)


SIZES = st.lists(st.integers(0, 4))


class Counting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(4, lambda block: None)
        self.held: list[Block] = []

    @rule()
    def take(self) -> None:
        self.held += self.pool.grow((), 1) or []
        self.pool.check([self.held])


def test_a_broken_line_is_found_and_mended(capsys: pytest.CaptureFixture[str]) -> None:
    holds(counts_agree, SIZES)
    with broken(BlockPool.grow, "idle + n >", "idle + n - 1 >"):
        falsify(counts_agree, SIZES)
        first = capsys.readouterr().out
        falsify(counts_agree, SIZES)
        assert capsys.readouterr().out == first.removeprefix(
            "counts_agree: 100 examples passed.\n"
        )
        falsify(Counting)
        assert "state.take()" in capsys.readouterr().out
    holds(counts_agree, SIZES)
    holds(Counting, examples=5)
    with pytest.raises(AssertionError, match="all of them passed"):
        falsify(counts_agree, SIZES, examples=20)


def test_it_is_mended_whatever_happens() -> None:
    code = BlockPool.grow.__code__
    with pytest.raises(KeyError):
        with broken(BlockPool.grow, "return None", "return []"):
            assert BlockPool.grow.__code__ is not code
            raise KeyError
    with pytest.raises(ValueError, match="0 times"):
        with broken(BlockPool.grow, "no such text", ""):
            pass
    assert BlockPool.grow.__code__ is code


# Weaving: what is cleaned away, what counts as a fault, what differs.
def notebook(*cells: Any) -> Any:
    return v4.new_notebook(cells=list(cells))


def code(source: str, *outputs: Any, **metadata: Any) -> Any:
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def printed(text: str, name: str = "stdout") -> Any:
    return v4.new_output("stream", name=name, text=text)


def faults_of(*cells: Any) -> str:
    words = v4.new_markdown_cell("word " * 3000)
    return "\n".join(weave.faults(weave.Chapter("xx", notebook(words, *cells), 1.0)))


def test_a_good_chapter_has_no_faults() -> None:
    assert faults_of(code("1 + 1", printed("2"))) == ""


@pytest.mark.parametrize(
    "cell, fault",
    [
        (code("f()", printed("careful", "stderr")), "stderr after 'f()': careful"),
        (code("f()", printed("in /usr/lib/x")), "an absolute path after 'f()'"),
        (code("f()", printed("<at 0x7f12ab34cd56>")), "an address in memory"),
        (code("f()", tags=["volatile"], reason="clock"), "1 of 1 code cells"),
        (code("f()", tags=["volatile"]), "a volatile cell without a reason"),
    ],
)
def test_faults_are_named(cell: Any, fault: str) -> None:
    assert fault in faults_of(cell)


def test_length_and_time_are_kept() -> None:
    short = weave.faults(weave.Chapter("xx", notebook(), 21.0))
    assert short == [
        "0 words, not 2500 to 4500",
        "21.0 s of processor time, over 20",
    ]
    with_model = notebook(code("llm = LLM()"))
    assert len(weave.faults(weave.Chapter("xx", with_model, 59.0))) == 1
    many = notebook(*(code(str(i)) for i in range(41)))
    assert "41 code cells, more than 40" in weave.faults(weave.Chapter("x", many, 0))


def test_words_are_prose() -> None:
    assert (
        weave.count_words(["Two words", "```python\nnot = these\n```<b>three</b>"]) == 3
    )


def test_cleaning_leaves_what_is_stable() -> None:
    widget = v4.new_output("display_data", {weave.WIDGET: {"model_id": "x"}})
    book = notebook(code("f()", printed("a"), printed("b"), widget, scrolled=True))
    book.cells[0].execution_count = 7
    book.metadata["widgets"] = {"state": {}}
    weave.clean(book)
    nbformat.validate(book)
    (cell,) = book.cells
    assert cell.execution_count is None and "widgets" not in book.metadata
    assert [o.text for o in cell.outputs] == ["ab"] and not cell.metadata
    again = notebook(code("f()", printed("ab")))
    weave.clean(again)
    assert again.cells[0].id == cell.id


def test_differences_are_stable_outputs_only() -> None:
    def pair(before: str, after: str, **metadata: Any) -> list[str]:
        old = notebook(code("f()", printed(before), **metadata))
        new = notebook(code("f()", printed(after), **metadata))
        return weave.differences("xx", new, old)

    assert pair("1", "1") == []
    (found,) = pair("1", "2")
    assert "another output after 'f()'" in found
    assert pair("1", "2", tags=["volatile"]) == []
    moved = weave.differences("xx", notebook(code("g()")), notebook(code("f()")))
    assert moved == ["book/xx.ipynb has other cells than book/src/xx.py"]


# Pages and the site.
def test_a_term_is_used_as_a_word() -> None:
    entry = {"forms": ["blocks"]}
    assert pages.uses("block", entry, "two Blocks of four")
    assert not pages.uses("block", entry, "a blocked road, block-wise")


def test_links_to_source_become_pages() -> None:
    linked: set[str] = set()
    text = "[`x.py:3`](../pagedattn/trace.py#L3) and [that](../LICENSE), [02](02.ipynb)"
    assert build.relink(text, linked) == (
        '<a href="source/pagedattn_trace.html#L-3"><code>x.py:3</code></a>'
        " and that, [02](02.ipynb)"
    )
    assert linked == {"pagedattn/trace.py"}
