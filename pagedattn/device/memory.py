"""How much of a card's memory the KV pool may take: arithmetic on measured bytes.

It knows four numbers that a start has measured and the share that was asked for. It
calls no device, and knows nothing of blocks or models. Chapter 07 reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.errors import UserError

GIB = 1 << 30
SHARE = 0.9  # of the card's memory, where no share is given
# What graphs keep for themselves, set aside before any is recorded: the driver's part
# of each, and the intermediate numbers of the largest, which all of them share.
GRAPH, PIECE, GRAPHS = 8 << 20, 512 << 10, 256 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """What a start measured, in bytes. `before` and `after` are the card's free memory
    before weights came and after the largest step ran; `transient` is what that step
    took in passing, beyond what it left."""

    total: int
    before: int
    after: int
    transient: int

    @property
    def held(self) -> int:
        """What this process holds by now: weights, scratch, libraries."""
        return self.before - self.after


def wanted(total: int, share: float) -> int:
    """Bytes that this process may take of a card of `total`."""
    return int(total * share)


def check_free(total: int, free: int, share: float) -> None:
    """UserError, before anything is loaded, where others hold what is asked for."""
    if wanted(total, share) > free:
        raise UserError(
            f"gpu_memory_utilization={share:g} asks for "
            f"{gib(wanted(total, share))} of the card's {gib(total)}, but only "
            f"{gib(free)} are free: lower "
            f"gpu_memory_utilization to {free * 100 // total / 100:.2f} or less, or "
            "end what holds the rest.",
            "gpu_memory_utilization",
        )


def graphs_take(count: int, pieces: int = 0) -> int:
    """Bytes set aside for so many graphs of whole steps, and of pieces of a layer."""
    return GRAPHS + count * GRAPH + pieces * PIECE if count + pieces else 0


def kv_bytes(profile: Profile, share: float, graphs: int = 0, pieces: int = 0) -> int:
    """Bytes for the KV pool: the share less what is held, in passing, and by graphs.

    UserError where nothing remains.
    """
    spent = profile.held + profile.transient + graphs_take(graphs, pieces)
    left = wanted(profile.total, share) - spent
    if left <= 0:
        raise UserError(
            f"gpu_memory_utilization={share:g} gives "
            f"{gib(wanted(profile.total, share))}, but weights and the largest step "
            f"take {gib(spent)}: raise it, lower max_num_batched_tokens or "
            "max_num_seqs, or set enforce_eager.",
            "gpu_memory_utilization",
        )
    return left


# What to lower when memory runs out, by what was being done.
LOWER = {
    "load": "choose a smaller model, or dtype=bfloat16",
    "profile": "lower max_num_batched_tokens or max_num_seqs",
    "cache": "lower gpu_memory_utilization or kv_cache_memory_bytes",
    "capture": "lower gpu_memory_utilization or max_cudagraph_capture_size, or set "
    "enforce_eager",
}


def out_of_memory(stage: str, free: int, total: int) -> UserError:
    """What to say when memory ran out at a stage of LOWER."""
    return UserError(
        f"The card's memory ran out ({stage}): {gib(free)} of {gib(total)} free. "
        f"{LOWER[stage].capitalize()}.",
        "gpu_memory_utilization" if stage in ("cache", "capture") else None,
    )


def gib(n: int) -> str:
    """Bytes in GiB, two digits behind the point."""
    return f"{n / GIB:.2f} GiB"
