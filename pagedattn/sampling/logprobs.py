"""Log-probabilities of raw logits: the chosen token's, its rank, the most likely.

Raw means before masks, penalties and temperature, as vLLM reports them by default.
Plain numpy out, in the one order of `filters`; ids that the model rules out have
-inf, which JSON can't hold: the server clamps. Built in chapter 08.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedattn.sampling.filters import ranked


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """One position: the token that stands there, and the `n` most likely ones.

    `logprob` and `rank` (1 = most likely) are the token's, whatever n is. `top_ids`
    int64 [n] and `top_logprobs` float64 [n] are most likely first, and hold the token
    only if it is one of them. Of equal logits the lower id ranks first.
    """

    token: int
    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def token_logprobs(row: np.ndarray, token: int, n: int) -> Logprobs:
    """`token`'s log-probability and rank, and the `n` most likely, of float32 [V].

    log softmax(x) = x - peak - log sum exp(x - peak), the sum in float64.
    """
    peak = row.max()
    log_total = float(peak) + np.log(np.exp(row - peak).sum(dtype=np.float64))
    top_ids = ranked(row, n) if n else np.empty(0, dtype=np.int64)
    own = row[token]
    before = np.count_nonzero(row > own) + np.count_nonzero(row[:token] == own)
    top = row[top_ids] - log_total
    return Logprobs(token, float(own - log_total), int(before) + 1, top_ids, top)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], n: int
) -> list[Logprobs]:
    """Of each row of logits [rows, V], the target id's and the `n` most likely.

    Row i is what the model said before it saw `targets[i]`. Rows do not affect each
    other, so any chunking of a prompt gives what the whole would.
    """
    assert len(logits) == len(targets), (logits.shape, len(targets))
    rows = logits.cpu().numpy()  # [rows, V]
    return [token_logprobs(row, t, n) for row, t in zip(rows, targets, strict=True)]
