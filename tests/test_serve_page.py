"""The page and the frames it draws; what a browser shows is tests/browser's."""

from __future__ import annotations

LONG = {"prompt": "a long story of many blocks", "max_tokens": 200, "ignore_eos": True}
