"""Rotary position embeddings: from a checkpoint's scaling parameters to one table.

Knows the published scalings and fixes those that depend on length once, from the
longest context the engine will serve, so that a cached key never depends on how its
prompt was chunked. Knows nothing of layers or requests. Chapter 01 counts its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedattn.errors import NotSupported


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding; `dim` of a head's dimensions turn, the rest stay.

    `trained_len` is the context before scaling, `full_len` the one the checkpoint
    states; fields that a kind doesn't read keep their defaults.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float | None = None
    trained_len: int = 0
    full_len: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def stretch(self) -> float:
        """The stated factor, else how much longer the context is than trained."""
        return self.factor or self.full_len / self.trained_len


# Fields of what transformers calls `rope_parameters` (5.x) or `rope_scaling` (before).
_OPTIONAL = (
    "factor", "attention_factor", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip


def read_rope(
    params: Mapping[str, Any], head_dim: int, full_len: int, trained_len: int | None
) -> Rope:
    """The rope that a configuration's parameters describe.

    `trained_len` is the configuration's own `original_max_position_embeddings`, which
    wins over the parameters'. Raises NotSupported for an unknown kind, and KeyError
    for a missing field of a known one.
    """
    kind = params.get("rope_type", params.get("type", "default"))
    # Early Phi-3 files say "su" or "yarn" and mean LongRoPE.
    kind = "longrope" if "long_factor" in params else kind
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise NotSupported(f"rope type {kind!r} is not supported; supported: {known}")
    given = {k: params[k] for k in _OPTIONAL if params.get(k) is not None}
    for key in ("short_factor", "long_factor"):
        given[key] = tuple(map(float, params.get(key) or ()))
    original = params.get("original_max_position_embeddings")
    return Rope(
        dim=int(head_dim * (params.get("partial_rotary_factor") or 1.0)),
        theta=float(params["rope_theta"]),
        kind=kind,
        trained_len=trained_len or original or full_len,
        full_len=full_len,
        **given,
    )


def cos_sin_table(rope: Rope, max_model_len: int) -> Tensor:
    """[max_model_len, dim] float32: each row the cosines, then the sines."""
    inv_freq, scale = SCALINGS[rope.kind](rope, max_model_len)
    angles = torch.arange(max_model_len).float()[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(scale)


# Each scaling returns the inverse frequencies [dim / 2] and what scales cos and sin.
def _default(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, rope.theta), 1.0


def _linear(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, rope.theta) / rope.stretch(), 1.0


def _dynamic(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    """NTK-aware: the base grows with the length, fixed here at the longest served."""
    length = max(max_model_len, rope.full_len)
    grown = rope.stretch() * length / rope.full_len - (rope.stretch() - 1)
    base = rope.theta * grown ** (rope.dim / (rope.dim - 2))
    return 1.0 / _wavelengths(rope, base), 1.0


def _llama3(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those between interpolated."""
    inv_freq = 1.0 / _wavelengths(rope, rope.theta)
    turns = rope.trained_len * inv_freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / rope.stretch()), 1.0


def _yarn(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between kept and stretched."""
    inv_freq = 1.0 / _wavelengths(rope, rope.theta)
    low, high = _yarn_dim(rope, rope.beta_fast), _yarn_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    steps = torch.arange(rope.dim // 2).float() - low
    keep = 1 - (steps / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / rope.stretch()), _yarn_scale(rope)


def _yarn_dim(rope: Rope, turns: float) -> float:
    """The dimension whose wave turns `turns` times within the trained context."""
    wave = rope.trained_len / (turns * 2 * math.pi)
    return rope.dim * math.log(wave) / (2 * math.log(rope.theta))


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    log = 0.1 * math.log(max(rope.stretch(), 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (log * rope.mscale + 1) / (log * rope.mscale_all_dim + 1)
    return log + 1


def _longrope(rope: Rope, max_model_len: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one factor per dimension, short or long context."""
    long = max_model_len > rope.trained_len
    factors = torch.tensor(rope.long_factor if long else rope.short_factor)
    stretch, scale = rope.stretch(), rope.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(rope.trained_len))
    return 1.0 / (factors * _wavelengths(rope, rope.theta)), scale


def _wavelengths(rope: Rope, base: float) -> Tensor:
    """base ** (2i / dim): positions per radian of each pair of dimensions."""
    return base ** (torch.arange(0, rope.dim, 2).float() / rope.dim)


SCALINGS: Mapping[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
