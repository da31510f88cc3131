"""The work that benchmarks measure: lengths of requests, the same on every machine.

Knows numbers of tokens; knows nothing of engines or clocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

# 64 requests at once, prompt:output tokens, 9,467 in and 5,843 out in all. Prompts of
# 16 to 512 tokens, outputs of 16 to 256.
MIXED = """
78:36 44:19 78:197 185:122 139:80 36:129 76:74 128:48
217:37 82:80 139:188 34:145 436:104 143:146 265:213 237:105
234:41 173:40 186:57 250:75 47:107 221:61 133:56 267:65
146:37 32:38 65:89 163:121 96:148 24:117 100:37 116:167
32:65 80:90 132:42 288:78 200:85 215:65 105:68 50:165
271:85 33:44 293:38 302:165 141:100 189:67 74:56 177:174
395:155 151:152 116:40 117:50 67:60 117:114 171:126 43:33
49:48 88:79 301:174 61:165 64:94 55:60 108:102 412:25
"""


def mixed_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request of the mixed workload."""
    pairs = (pair.split(":") for pair in MIXED.split())
    return [(int(prompt), int(output)) for prompt, output in pairs]


def random_prompts(
    lengths: list[int], vocab_size: int, seed: int = 0
) -> list[list[int]]:
    """One prompt of random ids below `vocab_size` for each length."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(n)] for n in lengths]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens: medians, and the spread σ of their logarithms."""

    prompt: float
    prompt_spread: float
    output: float
    output_spread: float

    def draw(self, n: int, seed: int = 0, longest: int = 2048) -> list[tuple[int, int]]:
        """`n` requests of (prompt, output) tokens, at least 4 each; those of more than
        `longest` in all are left out, as vLLM's benchmarks do."""
        draw, found = random.Random(seed), []
        while len(found) < n:
            prompt = draw.lognormvariate(log(self.prompt), self.prompt_spread)
            output = draw.lognormvariate(log(self.output), self.output_spread)
            pair = max(4, round(prompt)), max(4, round(output))
            if sum(pair) <= longest:
                found.append(pair)
        return found


# The traces of Kwon et al., "Efficient Memory Management for Large Language Model
# Serving with PagedAttention" (SOSP 2023), as far as it tells. Figure 11 gives the
# means: ShareGPT 161.31 in, 337.99 out; Alpaca 19.31 and 58.45. The spread of the
# outputs is the one that makes 13.3 % of the slots "reservation" in figure 2, "Orca
# (Max)"; those of the prompts are our guess, and move no share by more than 3 points.
SHAREGPT = Lengths(101.4, 1.0, 249.3, 0.86)
ALPACA = Lengths(16.1, 0.6, 40.4, 0.86)
