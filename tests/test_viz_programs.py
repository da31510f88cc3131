"""A launch drawn: what is written down is what the kernel's contract says it reads."""

import pytest
import torch
from pagedattn.kernels import spec

from pagedattn.viz.programs import Access, Batch, batch, picture, watching

pytest.importorskip("triton", reason="Triton is for Linux")

from pagedattn.kernels import gpu  # noqa: E402
from pagedattn.kernels.gpu import attention, ragged  # noqa: E402
from pagedattn.kernels.gpu.launch import Config  # noqa: E402

from pagedattn.book import broken  # noqa: E402
from pagedattn.book.source import listing  # noqa: E402


def decode(this: Batch, chunk: int) -> tuple[torch.Tensor, list[Access]]:
    """The Triton kernel's result for a batch, and what its programs touched."""
    out = torch.full_like(this.q, torch.nan)
    call = this.q, this.k, this.v, this.tables, this.lengths, 8**-0.5, 0, 0.0
    with watching() as seen:
        gpu.decode_attention.body(Config(dict(CHUNK=chunk, KEYS=4)), out, *call)
    expected = torch.empty_like(out)
    spec.decode_attention(expected, *call)
    torch.testing.assert_close(out, expected)
    return out, seen


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_each_sequence_reads_its_own_slots_once(chunk: int) -> None:
    this = batch()
    _, seen = decode(this, chunk)
    for s, length in enumerate(this.lengths.tolist()):
        for cache in (this.k, this.v):
            found = [
                slot
                for access in seen
                if access.program[2] == s and access.launch == 0
                if not access.stores and access.touches(cache)
                for slot in access.slots(cache)
            ]
            table = this.tables[s].tolist()
            assert found == [table[t // 4] * 4 + t % 4 for t in range(length)]


def test_outputs_are_written_once_by_the_second_launch() -> None:
    this = batch()
    out, seen = decode(this, 8)
    writes = [a for a in seen if a.stores and a.touches(out)]
    assert {a.launch for a in writes} == {1}
    written = torch.cat([torch.tensor(a.addresses[a.mask]) for a in writes])
    assert len(written) == len(written.unique()) == out.numel()


def test_the_picture_tells_who_returns() -> None:
    this = batch()
    figure = picture(decode(this, 8)[1], this)
    assert "6 programs, 5 of them" in figure.text
    assert "⬜ program (1, 0, 2), Cyd: returns" in figure.text
    assert "Ann: 6 slots, blocks 3 8" in figure.text
    assert figure.svg.count("(1, 0, 2) Cyd: returns") == 1


def test_a_tile_is_squares() -> None:
    _, seen = decode(this := batch(), 8)
    last = [a for a in seen if a.program == (1, 0, 0) and a.touches(this.k)][-1]
    rows = last.squares().split("\n")
    assert [row.count("🟦") for row in rows] == [8, 8, 0, 0]


def test_nothing_is_written_down_afterwards() -> None:
    this = batch()
    _, seen = decode(this, 8)
    before = len(seen)
    spec_like = torch.empty_like(this.q)
    call = this.q, this.k, this.v, this.tables, this.lengths, 1.0, 0, 0.0
    gpu.decode_attention(spec_like, *call)
    assert len(seen) == before


def test_interpreted_kernels_are_shown_and_broken() -> None:
    found = listing(attention.rows_at)
    assert found.names == ("rows_at",) and found.text.startswith("@triton.jit")
    this = batch()
    right, _ = decode(this, 8)
    with broken(attention.merge_chunks, "acc / total", "acc"):
        with pytest.raises(AssertionError):
            decode(this, 8)
    assert torch.equal(decode(this, 8)[0], right)
    assert ragged.tiles(21, 3, 8) == 5
