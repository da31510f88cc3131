"""The works that engines are compared by, as plain data: the same ids for everybody.

W1: the mixed workload at once. W2: one request of 128 in and 128 out. W3: 32 requests
on one prefix of 1,024 tokens. W4: W1's requests by 16 streaming clients, which needs a
server. Other ids in each run, so that no prefix cache knows them. Knows no engine.
"""

from __future__ import annotations

import random
from typing import Any

from pagedattn.bench.workloads import mixed_lengths

CLIENTS = 16
WORKS = ("W1", "W2", "W3", "W4")
LOWEST, HIGHEST = 100, 49_000  # ids of plain text in the demo model's vocabulary
Wanted = dict[str, Any]


class _Draw:
    """Requests of random ids, no two of them alike."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ids(self, n: int) -> list[int]:
        return [self._random.randrange(LOWEST, HIGHEST) for _ in range(n)]

    def request(self, prompt: int, output: int, prefix: list[int] = ()) -> Wanted:
        return {"prompt": [*prefix, *self.ids(prompt)], "max_tokens": output}

    def mixed(self) -> list[Wanted]:
        return [self.request(*lengths) for lengths in mixed_lengths()]

    def small(self) -> list[Wanted]:
        return [self.request(32, 4) for _ in range(8)]


def works_for(chosen: list[str], run: int) -> dict[str, Any]:
    """What a peer is given for one run: the first prompt, and each work's requests."""
    draw = _Draw(run)
    works: dict[str, Any] = {"first": draw.ids(16)}
    if "W1" in chosen:
        works["W1"] = {"warmup": draw.small(), "requests": draw.mixed()}
    if "W2" in chosen:
        requests = [draw.request(128, 128) for _ in range(3)]
        works["W2"] = {"warmup": draw.request(128, 16), "requests": requests}
    if "W3" in chosen:
        probed, prefix = draw.ids(1024), draw.ids(1024)
        works["W3"] = {
            "warmup": draw.small(),
            "cold": draw.request(32, 8, probed),
            "warm": draw.request(32, 8, probed),
            "requests": [draw.request(32, 32, prefix) for _ in range(32)],
        }
    return works


def served(run: int) -> list[Wanted]:
    """W4's requests."""
    return _Draw(1000 + run).mixed()
