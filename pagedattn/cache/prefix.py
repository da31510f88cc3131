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
    digest = sha256(parent)
    digest.update(len(tokens).to_bytes(4, "little"))
    digest.update(array("q", tokens).tobytes())
    for tag, value in extra:
        for part in (tag.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
    return digest.digest()


class PrefixIndex:
    """Key → block. Of two equal blocks the first stays indexed."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, hash: bytes, group: int) -> Block | None:
        """The block that holds this prefix's KV for this group, if any."""
        return self._blocks.get((hash, group))

    def put(self, hash: bytes, group: int, block: Block) -> bool:
        """Index `block`; False, changing nothing, if an equal one is indexed."""
        assert block.key is None
        if (hash, group) in self._blocks:
            return False
        block.key = (hash, group)
        self._blocks[block.key] = block
        return True

    def forget(self, block: Block) -> None:
        """Withdraw `block`, if it is indexed."""
        if block.key is not None:
            del self._blocks[block.key]
            block.key = None

    def check(self) -> None:
        """Assert that index and blocks agree."""
        for key, block in self._blocks.items():
            assert block.key == key
