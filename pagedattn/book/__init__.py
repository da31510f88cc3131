"""What chapters import: source that cannot drift, code broken on purpose, proofs live.

from pagedattn.book import broken, falsify, show
"""

from pagedattn.book.live import broken, falsify, holds
from pagedattn.book.source import show

__all__ = ["broken", "falsify", "holds", "show"]
