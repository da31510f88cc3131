"""Tokens as cells over the bytes they spell, and which of those bytes are out already.

Knows tokenizers, the detokenizer and how to draw them; what it draws as released is
what the detokenizer released. Chapter 02 shows its pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.text.detokenizer import Detokenizer
from pagedattn.text.tokenizer import Tokenizer
from pagedattn.viz.figure import TINTS, Figure, label, legend, page, rect
from pagedattn.viz.film import Camera
from pagedattn.viz.strip import strip

CELL, HEIGHT, LEFT, NAMES = 26, 24, 16, 96  # pixels; NAMES: the column of row names

# What a byte is at one moment: its colour, its square in text, its words.
STATES = {
    "coming": ("#ffffff", "⬜", "not sampled yet"),
    "shown": ("#c6d8ec", "🟦", "shown before"),
    "now": ("#55aa66", "🟩", "shown now"),
    "part": ("#e4d268", "🟨", "held: part of a character"),
    "maybe": ("#f0a270", "🟧", "held: may begin a stop string"),
    "cut": ("#e0707f", "🟥", "never shown"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One token pushed: the token, the text it released, the state of each byte."""

    token: str
    delta: str
    states: tuple[str, ...]


def visible(tokenizer: Tokenizer, token_id: int) -> str:
    """A token for human eyes: `·` is a space, `↵` a line's end, `f0 9f` are bytes that
    are no whole character; `<|im_end|>` is shortened to `<end>`."""
    piece = tokenizer.token_bytes(token_id)
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return " ".join("·" if byte == 32 else f"{byte:02x}" for byte in piece)
    if token_id in tokenizer.special_ids:
        return text.replace("|", "").replace("im_", "")
    return text.replace(" ", "·").replace("\n", "↵")


# Which bytes belong to which character and to which token.
def spelling(tokenizer: Tokenizer, text: str) -> Figure:
    """`text` three times: as characters, as bytes, as tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    sizes = [len(tokenizer.token_bytes(i)) for i in ids]
    owner = [at for at, size in enumerate(sizes) for _ in range(size)]
    data = text.encode()
    characters = [(_glyph(char), len(char.encode())) for char in text]
    y = (LEFT, LEFT + HEIGHT + 8, LEFT + 2 * HEIGHT + 16)
    parts = _names(zip(("characters", "bytes", "token ids"), y, strict=True))
    parts += _run(characters, y[0], ["#ffffff"])
    parts += _run([(f"{b:02x}", 1) for b in data], y[1], [TINTS[i % 6] for i in owner])
    parts += _run([(str(i), n) for i, n in zip(ids, sizes, strict=True)], y[2], TINTS)
    svg = page(NAMES + len(data) * CELL + LEFT, y[2] + HEIGHT + LEFT, parts)
    alt = f"{len(text)} characters are {len(data)} bytes and {len(ids)} tokens."
    return Figure(svg, _spelling_text(text, data, sizes), alt)


def _glyph(char: str) -> str:
    return {" ": "·", "\n": "↵"}.get(char, char)


def _names(rows: Iterable[tuple[str, float]]) -> list[str]:
    return [label(LEFT, y + 16, name, size=12, fill="#555555") for name, y in rows]


def _run(cells: Sequence[tuple[str, int]], y: float, fills: Sequence[str]) -> list[str]:
    """Cells side by side, each with its words and as wide as that many bytes."""
    parts, x = [], NAMES
    for (text, size), fill in zip(cells, cycle(fills), strict=False):
        width = size * CELL
        shade = 8 if len(text) * 7 > width else 12
        parts.append(rect(x, y, width, HEIGHT, fill, stroke="#999999"))
        parts.append(
            label(x + width / 2, y + 16, text, size=shade, text_anchor="middle")
        )
        x += width
    return parts


def _spelling_text(text: str, data: bytes, sizes: Sequence[int]) -> str:
    characters = "".join(_glyph(c).ljust(3 * len(c.encode())) for c in text)
    tokens = "".join(f"{i}".ljust(3 * n - 1, "─") + " " for i, n in enumerate(sizes))
    rows = [("characters", characters), ("bytes", data.hex(" ")), ("tokens", tokens)]
    return "\n".join(f"{name:<12}{row}".rstrip() for name, row in rows)


# Which bytes are out, token by token.
def release(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()
) -> Figure:
    """A row for each token pushed into a `Detokenizer`, one for its end: a cell for
    each byte of the text, coloured by whether it has been shown.

    `ids` must spell whole characters.
    """
    found = rows(tokenizer, ids, stop)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    parts = _run([(_glyph(c), len(c.encode())) for c in text], LEFT, ["#ffffff"])
    for i, row in enumerate(found, 1):
        parts += _release_row(row, LEFT + i * (HEIGHT + 4) + 4)
    seen = [name for name in STATES if any(name in row.states for row in found)]
    marks = [(STATES[name][2], STATES[name][0]) for name in seen]
    bottom = LEFT + (len(found) + 2) * (HEIGHT + 4)
    size = len(text.encode())
    width = max(
        NAMES + size * CELL + 40 + 8 * max(len(row.delta) for row in found),
        LEFT + sum(40 + 8 * len(name) for name, _ in marks),
    )
    svg = page(width, bottom + 14, [*parts, *legend(marks, LEFT, bottom)])
    alt = f"{size} bytes in {len(ids)} tokens: when each byte is shown."
    return Figure(svg, _release_text(found, seen), alt)


def _release_row(row: Row, y: float) -> list[str]:
    cells = [("", 1)] * len(row.states)
    parts = _names([(row.token, y)])
    parts += _run(cells, y, [STATES[state][0] for state in row.states])
    if row.delta:
        x = NAMES + len(row.states) * CELL + 10
        parts.append(label(x, y + 16, _quoted(row.delta), size=12))
    return parts


def rows(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()
) -> list[Row]:
    """What a `Detokenizer` does with `ids`, one row a token and one for the end; fewer
    where a stop string ends the text. ValueError unless they spell whole characters."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    if data.decode("utf-8", "replace").encode() != data:
        raise ValueError("the ids don't spell whole characters")
    output = Detokenizer(tokenizer, stop=stop, skip_special_tokens=False)
    found: list[Row] = []
    arrived = shown = 0
    for token_id in [*ids, None]:
        if token_id is None:
            output.finish()
        else:
            output.push([token_id])
            arrived += len(tokenizer.token_bytes(token_id))
        delta = output.take()
        before, shown = shown, shown + len(delta.encode())
        whole = len(data[:arrived].decode("utf-8", "ignore").encode())
        held = "cut" if output.stopped is not None else "maybe"
        ends = [("shown", before), ("now", shown), (held, whole), ("part", arrived)]
        name = "(end)" if token_id is None else visible(tokenizer, token_id)
        found.append(Row(name, delta, _states([*ends, ("coming", len(data))])))
        if output.stopped is not None:
            break
    return found


def _states(ends: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """A state for each byte: of each pair, the state up to that end."""
    states: list[str] = []
    for state, end in ends:
        states += [state] * (end - len(states))
    return tuple(states)


def _quoted(text: str) -> str:
    return "“" + "".join(map(_glyph, text)) + "”"


def _release_text(found: Sequence[Row], seen: Iterable[str]) -> str:
    width = max(len(row.token) for row in found) + 1
    lines = [
        f"{row.token:<{width}}"
        + "".join(STATES[state][1] for state in row.states)
        + (f" {_quoted(row.delta)}" if row.delta else "")
        for row in found
    ]
    return "\n".join([*lines, *(f"{STATES[s][1]} {STATES[s][2]}" for s in seen)])


# The book's ten blocks of four tokens, with a real tokenizer's tokens in them.
def in_blocks(
    tokenizer: Tokenizer, prompts: Mapping[str, Sequence[int]], num_blocks: int = 10
) -> Figure:
    """Where the tokens of `prompts` lie once the real scheduler has computed them in
    one step, blocks of four."""
    camera = Camera(lambda i: "" if i is None else visible(tokenizer, i))
    config = EngineConfig(block_size=4, num_blocks=num_blocks + 1)
    scheduler = scheduler_for(config, camera.emit)
    camera.watch(scheduler)
    for name, ids in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=2)
        scheduler.add(Request(name, list(ids), params, len(ids) + 2))
    assert run_step(scheduler) is not None, "no prompt fits"
    film = camera.film()
    computed = [frame for frame in film.frames if frame.kind == "compute"]
    return strip(computed[-1:], film.block_size)
