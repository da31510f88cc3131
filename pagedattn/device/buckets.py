"""Which shapes of a step are recorded as CUDA graphs, and which one serves a plan.

A graph replays one shape, so a plan of single tokens takes the smallest recorded one
that holds it, filled up with rows that compute nothing of use. It knows sizes only.
Chapter 07 reads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from pagedattn.errors import UserError

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
LARGEST = 512  # sequences in a graph, where nothing else is said
NARROWEST = 2048  # tokens of context: narrower tables save nothing worth a graph
WIDER = 4  # each width of tables is so many times the one below


@dataclass(frozen=True, slots=True)
class Shape:
    """One step's sizes: tokens, sequences, and block ids in a row of a table."""

    tokens: int
    seqs: int
    width: int


class Way(Enum):
    """How a step runs. Steps of single tokens alone have graphs of their own, with
    decode attention in them; others are one graph, or graphs between reads."""

    EAGER = "kernel by kernel"
    DECODE = "one graph, of single tokens"
    MIXED = "one graph, of any requests"
    PIECES = "graphs of so many tokens, and attention between them"


def checked_mode(mode: str, enforce_eager: bool) -> str:
    """The mode that holds; UserError for one that vLLM doesn't know."""
    if mode not in MODES:
        raise UserError(
            f"cudagraph_mode must be one of {', '.join(MODES)}, got {mode!r}.",
            "cudagraph_mode",
        )
    return "NONE" if enforce_eager else mode


def capture_sizes(
    max_num_seqs: int,
    given: Sequence[int] | None = None,
    largest: int | None = None,
) -> tuple[int, ...]:
    """Numbers of sequences, or of tokens, to record: vLLM's list, or the one given.

    Ascending: 1, 2, 4, then every 8th to 256, then every 16th. No step has more than
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
    """The recorded shapes: single tokens, every size with every width; others, each
    number of `tokens`: whole with up to `most` requests, or in pieces where that is 0.
    There are at most twice as many tokens as a step may have requests.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    most: int = 0

    def shapes(self) -> Iterator[tuple[Shape, Way]]:
        """All of them, the largest first, whose memory the others then share."""
        for size in reversed(self.tokens):
            way = Way.MIXED if self.most else Way.PIECES
            seqs = min(size, self.most) or -(-size // 2)  # there may be so many
            yield Shape(size, seqs, self.widths[-1]), way
        for width in reversed(self.widths):
            for size in reversed(self.sizes):
                yield Shape(size, size, width), Way.DECODE

    def choose(
        self, counts: Sequence[int], width: int, whole: bool = True
    ) -> tuple[Shape, Way]:
        """(shape, way) of a step of these token counts and tables so wide.

        Without `whole`, its attention stays out of graphs.
        """
        width, seqs, total = _at_least(self.widths, width), len(counts), sum(counts)
        if whole and seqs == total and self.sizes and seqs <= self.sizes[-1]:
            size = _at_least(self.sizes, seqs)
            return Shape(size, size, width), Way.DECODE
        recorded = self.tokens and (whole or not self.most)
        if not recorded or total > self.tokens[-1]:
            return Shape(total, seqs, width), Way.EAGER
        size = _at_least(self.tokens, total)
        if self.most:
            return Shape(size, min(size, self.most), self.widths[-1]), Way.MIXED
        return Shape(size, seqs, width), Way.PIECES


def _at_least(sizes: Sequence[int], n: int) -> int:
    return sizes[bisect_left(sizes, n)]
