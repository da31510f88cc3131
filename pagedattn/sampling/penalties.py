"""What changes logits before a token is chosen: masks, bias and penalties.

Each function changes one row, float32 [vocabulary], in place, in vLLM's order (see
`shape`). Knows one request's state; it does not know other rows, probabilities or
how the choice is made. Built in chapter 08.
"""

from collections.abc import Sequence

import numpy as np

from pagedattn.sampling.state import SampleState, TokenCounts

BLOCKED = -np.inf


def shape(raw: np.ndarray, state: SampleState) -> np.ndarray:
    """The row as the request wants it: a new array, `raw` is unchanged.

    In order: grammar, allowed ids, bad words, min_tokens, logit bias, penalties. A
    blocked token is -inf, and stays so; if every token is, so is the whole row.
    """
    row = raw.copy()
    if state.grammar is not None:
        state.grammar.block(row)
    if state.allowed_ids is not None:
        allow_only(row, state.allowed_ids)
    block_bad_words(row, state.bad_words_ids, state.output_ids)
    if state.holding:
        row[state.held_ids] = BLOCKED
    if state.bias is not None:
        ids, amounts = state.bias
        row[ids] += amounts
    if state.counts is not None:
        p = state.params
        penalize(row, state.counts, p.repetition_penalty)
        discourage(row, state.counts, p.frequency_penalty, p.presence_penalty)
    return row


def allow_only(row: np.ndarray, ids: np.ndarray) -> None:
    """Block every token but `ids`."""
    kept = row[ids]
    row.fill(BLOCKED)
    row[ids] = kept


def block_bad_words(
    row: np.ndarray, words: Sequence[Sequence[int]], output: Sequence[int]
) -> None:
    """Block the last token of each word whose other tokens end the output.

    A word of one token is always blocked. Prompt tokens never count as a beginning.
    """
    for *prefix, last in words:
        if not prefix or list(output[-len(prefix) :]) == prefix:
            row[last] = BLOCKED


def penalize(row: np.ndarray, seen: TokenCounts, repetition: float) -> None:
    """x / repetition where x > 0, else x × repetition, for tokens of prompt or output.

    Once per distinct token, however often it appeared (Keskar et al., 2019).
    """
    if repetition != 1.0:
        x = row[seen.ids]
        row[seen.ids] = np.where(x > 0, x / repetition, x * repetition)


def discourage(
    row: np.ndarray, seen: TokenCounts, frequency: float, presence: float
) -> None:
    """x - frequency × count - presence, for tokens generated at least once.

    The prompt's tokens do not count (OpenAI's rule).
    """
    if frequency or presence:
        counts = seen.counts
        drop = frequency * counts + presence * (counts > 0)
        row[seen.ids] -= drop.astype(np.float32)
