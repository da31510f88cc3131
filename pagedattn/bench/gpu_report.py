"""What `bench gpu` found: floors, shares and targets, as JSON, a table and a picture.

Knows figures, and neither a card nor a clock, so that its arithmetic is tested on
made-up ones. Targets are those of an H200 in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One card as it was measured: bytes copied (read and written) and bf16 matrix
    operations, both a second."""

    name: str
    driver: str
    torch: str
    triton: str
    date: str
    copy_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel on one problem: seconds, the least it has to move and to compute, and
    torch's own seconds for the same inputs, where it has such a thing."""

    name: str
    problem: str
    seconds: float
    bytes: float
    flops: float = 0.0
    peer: str = ""
    peer_seconds: float | None = None

    def floor(self, card: CardFacts) -> float:
        """The least seconds that the card could take."""
        return max(self.bytes / card.copy_bytes, self.flops / card.flops)

    def share(self, card: CardFacts) -> float:
        """Floor by seconds: 1 is as fast as can be."""
        return self.floor(card) / self.seconds


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel against float64: the largest error of a number, and what is allowed
    of it, both relative to the largest expected number."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether it is near enough; NaN is not."""
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps of `batch` single tokens at a mean context: seconds each."""

    batch: int
    context: int
    graphs: bool
    seconds: float
    bytes: float  # weights, once, and every context's keys and values
    busy: float | None = None  # share of the time in which some kernel runs

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.batch / self.seconds

    def share(self, card: CardFacts) -> float:
        """Of the byte floor."""
        return self.bytes / card.copy_bytes / self.seconds


def busy_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """The share of the time from the first begin to the last end in which at least one
    of the (begin, end) runs; None where there are none. The rest is launch gaps."""
    if not spans:
        return None
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    covered, reached = 0.0, first
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / (last - first) if last > first else None


def kernel_lines(
    card: CardFacts, checks: Sequence[Check], timings: Sequence[Timing]
) -> list[str]:
    """The card and its kernels, for a terminal."""
    lines = [
        f"{card.name}, driver {card.driver}, torch {card.torch}, "
        f"triton {card.triton}, {card.date}",
        f"copies {card.copy_bytes / 1e12:.2f} TB/s, "
        f"multiplies {card.flops / 1e12:.0f} TFLOP/s",
    ]
    for c in checks:
        word = "ok" if c.passed else "WRONG"
        lines.append(f"{c.name:28}{word:6} error {c.error:.1e} of {c.allowed:.0e}")
    for t in timings:
        peer = f"  {t.peer} {t.peer_seconds * 1e6:.0f} us" if t.peer_seconds else ""
        lines.append(
            f"{t.name:20}{t.problem:28}{t.seconds * 1e6:9.1f} us "
            f"{t.share(card):6.1%} of the floor{peer}"
        )
    return lines


@dataclass(frozen=True, slots=True)
class Found:
    """All of one run. Times to the first token: of `prompt` tokens, new and cached."""

    card: CardFacts
    checks: Sequence[Check]
    timings: Sequence[Timing]
    decodes: Sequence[Decode]
    prompt: int
    ttft: float
    ttft_hit: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of one long prompt."""
        return self.prompt / self.ttft

    def targets(self) -> list[tuple[str, float, float]]:
        """(what, wanted, reached), shares of what the card can do at most."""
        rows = [
            (f"{t.name} ({t.problem})", wanted, t.share(self.card))
            for t in self.timings
            for name, wanted in (("decode_attention", 0.8), ("prefill_attention", 0.6))
            if t.name == name
        ]
        return (
            rows
            + [
                (f"decode step, batch {d.batch}", 0.75, d.share(self.card))
                for d in self.decodes
                if d.graphs and d.batch <= 64
            ]
            + [
                (f"kernels' share of a step, batch {d.batch}", 0.95, d.busy)
                for d in self.decodes
                if d.graphs and d.busy is not None
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, with what is worked out from it."""
        card = self.card
        return {
            "card": asdict(card),
            "checks": [asdict(c) | {"passed": c.passed} for c in self.checks],
            "kernels": [
                asdict(t) | {"floor": t.floor(card), "share": t.share(card)}
                for t in self.timings
            ],
            "decode": [
                asdict(d)
                | {"tokens_per_second": d.tokens_per_second, "share": d.share(card)}
                for d in self.decodes
            ],
            "prefill": {
                "tokens": self.prompt,
                "tokens_per_second": self.prefill_tokens_per_second,
                "ttft": self.ttft,
                "ttft_prefix_hit": self.ttft_hit,
            },
            "targets": [
                {"what": what, "wanted": wanted, "reached": reached}
                for what, wanted, reached in self.targets()
            ],
        }

    def table(self) -> str:
        """Everything for a terminal."""
        card = self.card
        lines = kernel_lines(card, self.checks, self.timings)
        for d in self.decodes:
            lines.append(
                f"decode, batch {d.batch:4}, graphs {'on ' if d.graphs else 'off'} "
                f"{d.tokens_per_second:10.0f} tokens/s "
                f"{d.share(card):6.1%} of the floor, launch gaps "
                + ("not measured" if d.busy is None else f"{1 - d.busy:.1%}")
            )
        lines.append(
            f"prefill of {self.prompt}: {self.prefill_tokens_per_second:.0f} tokens/s; "
            f"first token after {self.ttft * 1e3:.1f} ms, "
            f"{self.ttft_hit * 1e3:.1f} ms with a prefix hit"
        )
        for what, wanted, reached in self.targets():
            word = "reached" if reached >= wanted else "MISSED"
            lines.append(f"target {what}: {wanted:.0%}, {reached:.1%} {word}")
        return "\n".join(lines)


def write(found: Found, folder: Path, stem: str = "gpu") -> tuple[Path, Path]:
    """One JSON file and one PNG in `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"{stem}.json", folder / f"{stem}.png"
    data.write_text(json.dumps(found.as_json(), indent=1) + "\n")
    plot(found, picture)
    return data, picture


def plot(found: Found, path: Path) -> None:
    """Each kernel's share of its floor, and decode's rate by batch, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [f"{t.name}\n{t.problem}" for t in found.timings]
    left.barh(names, [100 * t.share(found.card) for t in found.timings])
    left.set_xlabel("% of what memory or arithmetic allow")
    left.tick_params(axis="y", labelsize=6)
    for graphs in (True, False):
        some = [d for d in found.decodes if d.graphs is graphs]
        if some:
            right.plot(
                [d.batch for d in some],
                [d.tokens_per_second for d in some],
                marker="o",
                label=f"graphs {'on' if graphs else 'off'}",
            )
    right.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s")
    right.legend()
    figure.suptitle(f"{found.card.name}, {found.card.date}")
    figure.savefig(path, dpi=110)
