"""From a text's hidden states to its one embedding: which are taken, how it is scaled.

Knows pooling types, sentence-transformers' files that choose one, and
`--pooler-config`, which overrides them. Knows nothing of models, requests or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedattn.errors import NotSupported, UserError

TYPES = ("LAST", "MEAN", "CLS")
_MODES = {  # sentence-transformers' names
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_NAMES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}  # its newer files'


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model's hidden states become an embedding.

    `sizes` are the lengths that an embedding may be cut to (Matryoshka), None where
    the model doesn't say it can be cut, and empty where any length will do.
    """

    type: str = "LAST"
    normalize: bool = True
    sizes: tuple[int, ...] | None = None

    def check_dimensions(self, wanted: int | None, size: int) -> None:
        """Refuse a length that the model's embeddings can't be cut to."""
        if wanted is None or wanted == size:
            return
        if not 1 <= wanted <= size:
            raise UserError(
                f"dimensions must be in [1, {size}], got {wanted}.", "dimensions"
            )
        if self.sizes is None:
            raise UserError(
                f"dimensions={wanted}: this model was not made for shortened "
                f"(Matryoshka) embeddings; leave it out, or take its {size}.",
                "dimensions",
            )
        if self.sizes and wanted not in self.sizes:
            known = ", ".join(map(str, self.sizes))
            raise UserError(
                f"dimensions={wanted}: this model's embeddings have {known}.",
                "dimensions",
            )

    def with_activation(self, wanted: bool | None) -> Pooling:
        """The same, normalised or not as a request wants; None: as the model does."""
        return self if wanted is None else replace(self, normalize=wanted)

    def finish(self, pooled: Tensor, dimensions: int | None = None) -> Tensor:
        """pooled [size] cut to its first `dimensions`, then of length 1 if wanted."""
        cut = pooled if dimensions is None else pooled[:dimensions]
        return torch.nn.functional.normalize(cut, dim=-1) if self.normalize else cut


class Pool:
    """One text's hidden states, taken in piece by piece, and what they pool to."""

    def __init__(self, type: str) -> None:
        self._type, self._count = type, 0
        self._sum: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """The next hidden states [T, size]; they may change after the call."""
        if self._type == "LAST":
            self._sum = hidden[-1].clone()
        elif self._type == "MEAN":
            piece = hidden.sum(0)
            self._sum = piece if self._sum is None else self._sum + piece
            self._count += len(hidden)
        elif self._sum is None:
            self._sum = hidden[0].clone()

    def vector(self) -> Tensor:
        """[size]: the last, first, or mean hidden state of what was added."""
        assert self._sum is not None
        return self._sum / self._count if self._type == "MEAN" else self._sum


# Which pooling a model wants.
def read_pooling(
    folder: Path | None, default: str, override: Mapping[str, Any] | None
) -> Pooling:
    """The pooling that a model's folder asks for, changed as `override` says.

    Without sentence-transformers' modules.json it is `default`, normalised. Raises
    NotSupported for a module that isn't built, UserError for a bad override.
    """
    found = Pooling(default)
    if folder is not None and (folder / "modules.json").is_file():
        found = _from_modules(folder, default)
    if folder is not None and (folder / "config.json").is_file():
        found = replace(found, sizes=_sizes(_read(folder / "config.json")))
    return _overridden(found, override or {})


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}", "model") from None


def _from_modules(folder: Path, default: str) -> Pooling:
    type, normalize = default, False
    for module in _read(folder / "modules.json"):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":  # its folder's name only: nothing outside is read
            type = _pooling_type(
                _read(folder / Path(module["path"]).name / "config.json")
            )
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise NotSupported(f"sentence-transformers' {kind} is not built.", "model")
    return Pooling(type, normalize)


def _pooling_type(config: Mapping[str, Any]) -> str:
    if "pooling_mode" in config:
        found = {_NAMES.get(str(config["pooling_mode"]), str(config["pooling_mode"]))}
    else:
        modes = {k for k, v in config.items() if k.startswith("pooling_mode") and v}
        found = {_MODES.get(mode, mode) for mode in modes}
    if len(found) != 1 or not found <= set(TYPES):
        raise NotSupported(
            f"pooling {', '.join(sorted(found)) or 'of no kind'} is not built; there "
            f"are {', '.join(TYPES)}.",
            "model",
        )
    return found.pop()


def _sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(sizes)
    return () if config.get("is_matryoshka") else None


def _overridden(found: Pooling, override: Mapping[str, Any]) -> Pooling:
    """`--pooler-config`: vLLM's keys, and Matryoshka's two as in a config.json."""
    for key, value in override.items():
        if key in ("pooling_type", "seq_pooling_type"):
            if str(value).upper() not in TYPES:
                raise _bad(key, f"one of {', '.join(TYPES)}", value)
            found = replace(found, type=str(value).upper())
        elif key in ("normalize", "use_activation"):
            if not isinstance(value, bool):
                raise _bad(key, "true or false", value)
            found = replace(found, normalize=value)
        elif key in ("is_matryoshka", "matryoshka_dimensions"):
            found = replace(found, sizes=_sizes(override))
        else:
            raise NotSupported(
                f"pooler_config key {key!r} is not supported.", "pooler_config"
            )
    return found


def _bad(key: str, rule: str, value: Any) -> UserError:
    return UserError(
        f"pooler_config: {key} must be {rule}, got {value!r}.", "pooler_config"
    )
