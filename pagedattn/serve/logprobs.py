"""Log-probabilities in the shapes of completions, chats and vLLM's prompt_logprobs.

Knows `Logprob` and token bytes; nothing of requests. Values that JSON can't carry are
clamped: −inf, and anything below, is −9999.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedattn.request import Logprob
from pagedattn.text.tokenizer import Tokenizer

LOWEST = -9999.0

Position = dict[int, Logprob] | None  # the candidates at one position, None: unknown
Namer = Callable[[int, Logprob], str]


def finite(logprob: float) -> float:
    """The value, at least `LOWEST`; NaN becomes `LOWEST` too."""
    return logprob if logprob >= LOWEST else LOWEST


def namer(tokenizer: Tokenizer, as_ids: bool) -> Namer:
    """How tokens are shown: their text, or `token_id:N`."""
    if as_ids:
        return lambda token, _: f"token_id:{token}"
    return lambda token, lp: lp.decoded_token or tokenizer.token_str(token)


def ranked(position: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The `top` most likely candidates, best first; ties as they came. -1: all."""
    best = sorted(position.items(), key=lambda item: -finite(item[1].logprob))
    return best if top < 0 else best[:top]


# Completions: four parallel lists.
def completion_logprobs(
    ids: Sequence[int],
    positions: Sequence[Position],
    top: int,
    name: Namer,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """OpenAI's completion shape, its texts starting at `offset`, and where they end.

    Where two candidates have one text, the better stands in `top_logprobs`; the
    chosen token's own value is in `token_logprobs` whatever `top` is.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, position in zip(ids, positions, strict=True):
        own = (position or {}).get(token, Logprob(0.0))
        tokens.append(name(token, own))
        values.append(None if position is None else finite(own.logprob))
        tops.append(None if position is None else _named(token, position, top, name))
        offsets.append(offset)
        offset += len(tokens[-1])
    shape = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens}
    return {**shape, "top_logprobs": tops}, offset


def _named(
    chosen: int, position: dict[int, Logprob], top: int, name: Namer
) -> dict[str, float]:
    named: dict[str, float] = {}
    candidates = ranked(position, top)
    if chosen in position:
        candidates.append((chosen, position[chosen]))
    for token, lp in candidates:
        named.setdefault(name(token, lp), finite(lp.logprob))
    return named


# Chats: a list of objects.
def chat_logprobs(
    ids: Sequence[int],
    positions: Sequence[Position],
    top: int,
    name: Namer,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """OpenAI's chat shape; `bytes` are the token's own, also of partial characters."""

    def entry(token: int, lp: Logprob) -> dict[str, Any]:
        return {
            "token": name(token, lp),
            "logprob": finite(lp.logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for token, position in zip(ids, positions, strict=True):
        position = position or {}
        own = entry(token, position.get(token, Logprob(LOWEST)))
        tops = [entry(t, lp) for t, lp in ranked(position, top)]
        content.append({**own, "top_logprobs": tops})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    positions: Sequence[Position] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: for each prompt token, token id -> value, rank and text."""
    if positions is None:
        return None
    name = namer(tokenizer, False)
    return [
        position
        and {
            str(token): {
                "logprob": finite(lp.logprob),
                "rank": lp.rank,
                "decoded_token": name(token, lp),
            }
            for token, lp in position.items()
        }
        for position in positions
    ]
