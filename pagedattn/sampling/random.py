"""Random numbers as a pure function of who asks: no state, no order of calls.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
in whole-number arithmetic, so the bits are equal on every platform, in any batch and
on any number of threads. Knows nothing of logits. Built in chapter 08.
"""

from enum import IntEnum
from typing import TypeVar

import numpy as np

Words = TypeVar("Words", int, np.ndarray)  # a whole number, or a uint64 array of them

LOW = 0xFFFFFFFF  # the low 32 bits
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1, added to the key
ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides; different purposes draw independent numbers."""

    TOKEN = 0


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for a counter and a key of 32-bit words.

    Whole numbers give whole numbers; uint64 arrays give arrays, element by element.
    """
    a, b, c, d = counter
    k, q = key
    for _ in range(ROUNDS):
        x, y = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # 64-bit products
        a, b, c, d = (y >> 32) ^ b ^ k, y & LOW, (x >> 32) ^ d ^ q, x & LOW
        k, q = (k + WEYL[0]) & LOW, (q + WEYL[1]) & LOW
    return a, b, c, d


def uniform(seed: Words, sibling: Words, position: Words, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits (an array of them, for uint64 arrays).

    The key is `seed` modulo 2^64, the counter (position, sibling, purpose, 0) with
    each modulo 2^32.
    """
    key = seed & LOW, (seed >> 32) & LOW
    counter = position & LOW, sibling & LOW, int(purpose), 0
    high, low, _, _ = philox(counter, key)
    return ((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53
