"""One token per row of logits, chosen as each row's request asks.

Order, as vLLM's: raw log-probabilities; grammar, allowed ids, bad words, min_tokens,
bias and penalties (`penalties`); the greedy pick; temperature, min-p, top-k, top-p
(`filters`); one draw. Rows never meet: each is computed alone, so neighbours can't
change a bit of it, and a row pays only for what it asks. Built in chapter 08.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedattn.sampling.filters import survivors
from pagedattn.sampling.logprobs import Logprobs, token_logprobs
from pagedattn.sampling.penalties import shape
from pagedattn.sampling.random import Purpose, uniform
from pagedattn.sampling.state import SampleState

CHUNK = 256  # weights summed at once: a running sum over 262,144 takes 30 times longer
BROKEN = "the model's logits are not finite numbers (NaN or infinity)"
NOTHING_LEFT = (
    "no token may be sampled: structured_outputs, allowed_token_ids, bad_words and "
    "min_tokens block all"
)


class Sample(NamedTuple):
    """What one row gave: a token, or else the reason why there is none.

    A failed row has `token` None and `error` set; the other rows are unaffected.
    """

    token: int | None
    logprobs: Logprobs | None = None
    error: str | None = None


def sample(logits: torch.Tensor, states: Sequence[SampleState]) -> list[Sample]:
    """The next token of each request: row i of float32 logits [rows, V] for state i.

    Changes neither the logits nor the states: the caller appends the token. A row
    whose largest logit is NaN or infinite, or whose masks leave no token, fails.
    All rows greedy and unmasked cost one argmax. Of equal logits the lowest id wins.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert len(logits) == len(states), (logits.shape, len(states))
    tokens, peaks = _greedy(logits)
    with np.errstate(over="ignore"):  # finite masks such as -3e38 become -inf
        return [
            _sample_row(logits, i, state, tokens[i], peaks[i])
            for i, state in enumerate(states)
        ]


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Each row's first largest logit, id and value; a NaN counts as largest."""
    if logits.device.type != "cpu":
        peaks, _ = logits.max(dim=1)
        return logits.argmax(dim=1).tolist(), peaks.tolist()
    rows = logits.numpy()  # numpy: 3 us for 49,152 logits, torch.argmax: 120
    tokens = rows.argmax(axis=1)
    return tokens.tolist(), rows[np.arange(len(rows)), tokens].tolist()


def _sample_row(
    logits: torch.Tensor, i: int, state: SampleState, token: int, peak: float
) -> Sample:
    """Row `i`'s sample, given its first largest logit, `token` and `peak`."""
    if not math.isfinite(peak):
        return Sample(None, error=BROKEN)
    if state.plain:
        return Sample(token)
    n = state.num_logprobs
    raw = logits[i].cpu().numpy()  # [V], a view where the logits are on the CPU
    row = shape(raw, state) if state.shaped else raw
    if state.grammar is not None and state.grammar.error:
        return Sample(None, error=f"the grammar failed: {state.grammar.error}")
    chosen = choose(row, state)
    if chosen is None:
        return Sample(None, error=NOTHING_LEFT)
    return Sample(chosen, None if n is None else token_logprobs(raw, chosen, n))


def choose(row: np.ndarray, state: SampleState) -> int | None:
    """The token that `state` takes from shaped logits [V]; None if all are blocked."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        return None
    if state.greedy:
        return best
    ids, weights = survivors(row, float(row[best]), state.params)
    u = uniform(state.seed, state.sibling, state.position, Purpose.TOKEN)
    i = pick(weights, u)
    return i if ids is None else int(ids[i])


def pick(weights: np.ndarray, u: float) -> int:
    """The index whose share of the total weight holds `u` in [0, 1): inverse CDF.

    One uniform number a row, where a Gumbel race wants one per token. Sums run in
    float64 by ascending index; an index without weight is never picked.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), CHUNK), dtype=np.float64)
    ends = np.cumsum(sums)  # [chunks]
    goal = u * ends[-1]
    chunk = _passing(ends, goal)
    start = chunk * CHUNK
    inside = np.cumsum(weights[start : start + CHUNK], dtype=np.float64)
    return start + _passing(inside, goal - (ends[chunk - 1] if chunk else 0.0))


def _passing(sums: np.ndarray, goal: float) -> int:
    """The first index whose running sum is above `goal`, else the last that grew."""
    last = np.searchsorted(sums, sums[-1])
    return min(int(np.searchsorted(sums, goal, side="right")), int(last))
