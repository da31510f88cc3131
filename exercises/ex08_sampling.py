# Exercise 8 · Sampling: build it.
#
# This is pagedattn/sampling/filters.py without these bodies:
#
#     first
#     nucleus
#     survivors
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=8    the engine's own tests on your file, and one hint
#     make hint N=8        a hint alone
#     make reset N=8       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=8 make serve    the server, on your code
#
# The idea is in book/08_sampling.ipynb.
# One solution is pagedattn/sampling/filters.py itself.
#
# Made from pagedattn/sampling/filters.py by exercises/tools.py. Untouched: 59b06b3e7eaa

"""Which tokens may be drawn: min-p, top-k and top-p over one row's weights.

One order rules everything that ranks tokens: larger value first, of equal values the
lower id. So "top k" is exactly k tokens and greedy is top-1. Knows nothing of
requests' tokens or of randomness. Built in chapter 08.
"""

import numpy as np

from pagedattn.request import SamplingParams

Ids = np.ndarray  # int64 [n]: token ids
NEGLIGIBLE = 50.0  # exp(-50) times 262,144 tokens is 5e-17; float64 rounds 1 by 1e-16
DRAWER_BITS = 18  # dropped of a float32: a drawer's weights are within 1/32 of another


def first(values: np.ndarray, n: int) -> Ids:
    """The ids of the `n` first values in the one order, ascending by id; O(size)."""
    raise NotImplementedError("exercise 8: first")


def ranked(values: np.ndarray, n: int) -> Ids:
    """The ids of the `n` first values, in the one order."""
    ids = first(values, n)
    return ids[np.argsort(-values[ids], kind="stable")]


def nucleus(weights: np.ndarray, p: float) -> Ids:
    """Ids of the shortest beginning of the one order that holds `p` of the weight.

    Ascending by id. The token that crosses `p` is in, so there is always one
    (Holtzman et al., 2020). `weights` are float32, not negative, not all zero.
    """
    raise NotImplementedError("exercise 8: nucleus")


def contenders(row: np.ndarray, peak: float, params: SamplingParams) -> Ids | None:
    """Ids of the top k of logits [V], or of all that could matter; None: all of them.

    `peak` is the largest logit. Ids that together weigh less than float64's rounding
    of the largest weight may be left out: no draw could tell.
    """
    if 0 < params.top_k < len(row):
        return first(row, params.top_k)
    near = row > peak - NEGLIGIBLE * params.temperature
    few = np.count_nonzero(near) < len(row) // 4  # else gathering costs more than exp
    return np.flatnonzero(near) if few else None


def survivors(
    row: np.ndarray, peak: float, params: SamplingParams
) -> tuple[Ids | None, np.ndarray]:
    """What a draw from logits [V] may give: ids, ascending (None: all), and weights.

    weight = exp((logit - peak) / temperature), `peak` the largest logit, so that the
    largest weight is 1. Then min-p and top-k, which both keep a beginning of the one
    order, so that either may come first; then top-p of what they left, renormalised,
    in the order of weights. At least one token remains.
    """
    raise NotImplementedError("exercise 8: survivors")


def _narrow(
    ids: Ids | None, weights: np.ndarray, chosen: Ids
) -> tuple[Ids, np.ndarray]:
    return chosen if ids is None else ids[chosen], weights[chosen]
