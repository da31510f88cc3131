"""pagedattn: a language model server small enough to read.

The front door: the names a caller needs, and nothing else. Importing it loads no
torch; `LLM` and its kin bring the engine in when they are first asked for.
"""

import gc
import os
from importlib import import_module
from typing import Any

if os.environ.get("PAGEDATTN_STUDENT"):  # before any module that it may replace
    from pagedattn import student

    try:
        student.install()
    except student.UserError as error:  # the shell's mistake, no program's
        raise SystemExit(f"pagedattn: {error}") from None

from pagedattn.config import EngineArgs
from pagedattn.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pagedattn.version import __version__

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

# OpenMP's waiting threads spin for milliseconds by default, which ruins everyone as
# soon as another process wants a core: 16 streaming clients on two busy cores got 32
# tokens/s, and 57 with this limit (about 0.1 ms). Alone, W1 took 37.2 s, not 36.6.
# Read once, when torch loads OpenMP; a caller who has chosen is left alone.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_ENGINE = {
    "LLM": "pagedattn.llm",
    "Engine": "pagedattn.engine",
    "AsyncEngine": "pagedattn.async_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _ENGINE:
        raise AttributeError(f"module 'pagedattn' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # torch is half a million objects that stay, and no garbage
    try:
        return getattr(import_module(_ENGINE[name]), name)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
