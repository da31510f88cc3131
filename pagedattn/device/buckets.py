"""Which shapes of a step are recorded as CUDA graphs, and which one serves a plan.

A graph replays one shape, so a plan of single tokens takes the smallest recorded one
that holds it, filled up with rows that compute nothing of use. It knows sizes only.
Chapter 07 reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pagedattn.errors import NotSupported, UserError

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
BUILT = ("NONE", "FULL_DECODE_ONLY")
LARGEST = 512  # sequences in a graph, where nothing else is said
NARROWEST = 2048  # tokens of context: narrower tables save nothing worth a graph
WIDER = 4  # each width of tables is so many times the one below


@dataclass(frozen=True, slots=True)
class Shape:
    """One step's sizes: tokens, sequences, and block ids in a row of a table."""

    tokens: int
    seqs: int
    width: int


def checked_mode(mode: str, enforce_eager: bool) -> str:
    """The mode that holds; NotSupported for one of vLLM's that isn't built."""
    if mode not in MODES:
        raise UserError(
            f"cudagraph_mode must be one of {', '.join(MODES)}, got {mode!r}.",
            "cudagraph_mode",
        )
    if mode not in BUILT:
        raise NotSupported(
            f"cudagraph_mode={mode} is not built: {' and '.join(BUILT)} are.",
            "cudagraph_mode",
        )
    return "NONE" if enforce_eager else mode


def capture_sizes(
    max_num_seqs: int,
    given: Sequence[int] | None = None,
    largest: int | None = None,
) -> tuple[int, ...]:
    """Numbers of sequences to record, ascending: vLLM's list, or the one given.

    1, 2, 4, then every 8th to 256, then every 16th. No step has more than
    `max_num_seqs`, so a last size holds exactly those, if `largest` allows it.
    """
    most = min(largest or LARGEST, max_num_seqs)
    if given is not None:
        if not given or any(n < 1 for n in given):
            raise UserError(
                f"cudagraph_capture_sizes must be sizes of 1 or more, got {given}.",
                "cudagraph_capture_sizes",
            )
        return tuple(sorted({min(n, most) for n in given}))
    sizes = chain((1, 2, 4), range(8, 256, 8), range(256, most + 1, 16))
    return tuple(sorted({n for n in sizes if n <= most} | {most}))


def table_widths(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Block ids in a row of a table, ascending; the last holds the longest context.

    Decode attention starts a program for every chunk that a table could hold, so
    short contexts are better off with narrow tables.
    """
    width, widths = -(-max_model_len // block_size), []
    while width * block_size >= NARROWEST or not widths:
        widths.append(width)
        width = -(-width // WIDER)
    return tuple(reversed(widths))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The recorded shapes: every size with every width. No sizes: nothing is."""

    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def shapes(self) -> Iterator[Shape]:
        """All of them, the largest first, whose memory the others then share."""
        for width in reversed(self.widths):
            for size in reversed(self.sizes):
                yield Shape(size, size, width)

    def choose(self, counts: Sequence[int], width: int) -> tuple[Shape, bool]:
        """(shape, recorded) of a step of these token counts and tables so wide."""
        width = _at_least(self.widths, width)
        single = len(counts) == sum(counts)
        if single and self.sizes and len(counts) <= self.sizes[-1]:
            size = _at_least(self.sizes, len(counts))
            return Shape(size, size, width), True
        return Shape(sum(counts), len(counts), width), False


def _at_least(sizes: Sequence[int], n: int) -> int:
    return sizes[bisect_left(sizes, n)]
