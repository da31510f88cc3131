"""What each row of a step asks of sampling, as numbers that a kernel reads.

A row that wants more than temperature, top-k, top-p and min-p is sampled on the host,
from its logits (`sampling.sampler`). It knows requests' parameters; random numbers
depend on seed, sibling and position alone, so they are drawn before the logits exist.
Chapter 07 reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedattn.device.staging import Fields
from pagedattn.sampling.filters import survivors
from pagedattn.sampling.random import Purpose, uniform
from pagedattn.sampling.sampler import pick
from pagedattn.sampling.state import SampleState

WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row: whose token it chooses, and where that token will stand."""

    state: SampleState
    position: int


def on_host(state: SampleState) -> bool:
    """Whether a request's row needs its logits on the host."""
    return state.shaped or state.num_logprobs is not None


def fill_draws(fields: Fields, draws: Sequence[Draw | None]) -> None:
    """Write what each row asks; None, and rows beyond, take the largest logit."""
    fields.temperature.zero_()
    fields.top_k.zero_()
    fields.min_p.zero_()
    fields.uniform.zero_()
    fields.top_p.fill_(1.0)
    drawn = [
        (row, draw)
        for row, draw in enumerate(draws)
        if draw is not None and not draw.state.greedy
    ]
    if not drawn:
        return
    rows = torch.tensor([row for row, _ in drawn])
    params = [draw.state.params for _, draw in drawn]
    fields.temperature[rows] = torch.tensor([p.temperature for p in params]).float()
    fields.top_k[rows] = torch.tensor([max(p.top_k, 0) for p in params]).int()
    fields.min_p[rows] = torch.tensor([p.min_p for p in params]).float()
    fields.top_p[rows] = torch.tensor([p.top_p for p in params]).double()
    fields.uniform[rows] = torch.from_numpy(_uniforms([draw for _, draw in drawn]))


def _uniforms(draws: Sequence[Draw]) -> np.ndarray:
    """float64 [rows]: each row's random number."""
    seeds, siblings, positions = (
        np.array(values, dtype=np.uint64)
        for values in (
            [draw.state.seed & WORD for draw in draws],
            [draw.state.sibling for draw in draws],
            [draw.position for draw in draws],
        )
    )
    return np.asarray(uniform(seeds, siblings, positions, Purpose.TOKEN))


class Asked(NamedTuple):
    """One row's filters, under the names that `filters` reads."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def sample_rows(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> None:
    """As spec.sample, on the processor, by the same filters as the host's sampler."""
    asked = zip(*(x.tolist() for x in (temperature, top_k, top_p, min_p)), strict=True)
    rows = logits.numpy()
    for r, (filters, u) in enumerate(zip(asked, uniform.tolist(), strict=True)):
        out[r] = _sample_row(rows[r], Asked(*filters), u)


def _sample_row(row: np.ndarray, asked: Asked, u: float) -> int:
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        return -1
    if asked.temperature == 0:
        return best
    ids, weights = survivors(row, float(row[best]), asked)
    i = pick(weights, u)
    return i if ids is None else int(ids[i])
