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
    if n >= len(values):
        return np.arange(len(values))
    cut = np.partition(values, len(values) - n)[-n]  # the nth value
    keep = values > cut
    ties = np.flatnonzero(values == cut)
    keep[ties[: n - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)


def ranked(values: np.ndarray, n: int) -> Ids:
    """The ids of the `n` first values, in the one order."""
    ids = first(values, n)
    return ids[np.argsort(-values[ids], kind="stable")]


def nucleus(weights: np.ndarray, p: float) -> Ids:
    """Ids of the shortest beginning of the one order that holds `p` of the weight.

    Ascending by id. The token that crosses `p` is in, so there is always one
    (Holtzman et al., 2020). `weights` are float32, not negative, not all zero.
    """
    # A token under (1 - p) / V of the total can't be in: all such tokens weigh less
    # than 1 - p, so the others reach p without them. 0.999 keeps clear of rounding.
    total = weights.sum(dtype=np.float64)
    ids = np.flatnonzero(weights >= 0.999 * (1 - p) * total / len(weights))
    heavy = weights[ids]

    # Floats that are not negative are ordered as their bits are, so the upper bits
    # file each token in a drawer: adding up 4,065 drawers replaces a sort.
    drawers = heavy.view(np.int32) >> DRAWER_BITS
    mass = np.bincount(drawers, heavy)
    reached = np.cumsum(mass[::-1])[::-1]  # weight of a drawer and all heavier ones

    # Only the drawer where the running sum crosses the goal is put in order.
    crossing = np.count_nonzero(reached >= p * total) - 1
    keep = drawers > crossing
    inside = np.flatnonzero(drawers == crossing)
    order = inside[np.argsort(-heavy[inside], kind="stable")]
    sums = np.cumsum(heavy[order], dtype=np.float64)
    missing = p * total - (reached[crossing] - mass[crossing])
    keep[order[: np.searchsorted(sums, missing) + 1]] = True
    return ids[keep]


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
    ids = contenders(row, peak, params)
    weights = (row if ids is None else row[ids]) - np.float32(peak)
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    if params.min_p > 0:
        ids, weights = _narrow(ids, weights, np.flatnonzero(weights >= params.min_p))
    if params.top_p < 1:
        ids, weights = _narrow(ids, weights, nucleus(weights, params.top_p))
    return ids, weights


def _narrow(
    ids: Ids | None, weights: np.ndarray, chosen: Ids
) -> tuple[Ids, np.ndarray]:
    return chosen if ids is None else ids[chosen], weights[chosen]
