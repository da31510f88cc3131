"""The page and the frames it draws; what a browser shows is tests/browser's."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.serve.page import FILE
from pagedattn.serve.settings import ServeArgs
from pagedattn.testing import hash_engine
from pagedattn.viz.live import KEPT, WATCHED, Film

LONG = {"prompt": "a long story of many blocks", "max_tokens": 200, "ignore_eos": True}
