# Exercise 4 · Prefix cache: build it.
#
# This is pagedattn/cache/prefix.py without these bodies:
#
#     block_hash
#     PrefixIndex.get
#     PrefixIndex.put
#     PrefixIndex.forget
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=4    the engine's own tests on your file, and one hint
#     make hint N=4        a hint alone
#     make reset N=4       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=4 make serve    the server, on your code
#
# The idea is in book/04_prefix.ipynb.
# One solution is pagedattn/cache/prefix.py itself.
#
# Made from pagedattn/cache/prefix.py by exercises/tools.py. Untouched: 877676589729

"""The prefix index: from what a block holds to the block that holds it.

A block's hash covers its tokens, its extra keys and, through its parent's hash,
everything before it, so equal hashes mean equal prefixes. Knows nothing of requests
or of when a block may be shared. Built in chapter 04.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from pagedattn.cache.blocks import Block

ROOT = sha256(b"pagedattn prefix v1").digest()  # the parent of every first block
Key = tuple[bytes, int]  # a block's hash and the layer group whose KV it holds
ExtraKeys = Iterable[tuple[str, str]]


def block_hash(parent: bytes, tokens: Sequence[int], extra: ExtraKeys = ()) -> bytes:
    """SHA-256 of the parent's hash, the token ids and the tagged extra keys.

    Extra keys ("salt", …), ("adapter", …), ("image", …) keep apart what equal tokens
    don't. Counts and lengths stand before what they count, so no two inputs run
    together.
    """
    raise NotImplementedError("exercise 4: block_hash")


class PrefixIndex:
    """Key → block. Of two equal blocks the first stays indexed."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, hash: bytes, group: int) -> Block | None:
        """The block that holds this prefix's KV for this group, if any."""
        raise NotImplementedError("exercise 4: PrefixIndex.get")

    def put(self, hash: bytes, group: int, block: Block) -> bool:
        """Index `block`; False, changing nothing, if an equal one is indexed."""
        raise NotImplementedError("exercise 4: PrefixIndex.put")

    def forget(self, block: Block) -> None:
        """Withdraw `block`, if it is indexed."""
        raise NotImplementedError("exercise 4: PrefixIndex.forget")

    def check(self) -> None:
        """Assert that index and blocks agree."""
        for key, block in self._blocks.items():
            assert block.key == key
