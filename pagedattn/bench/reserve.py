"""Where KV memory goes when every request reserves its slots in one piece, and paged.

Replays requests of known lengths through the three reservation schemes of the vLLM
paper (Kwon et al., SOSP 2023, section 6.1), with the buddy allocator it assumes, and
through the real scheduler's blocks. Counts slots and steps; knows nothing of models or
clocks. Chapter 03 reads these figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams

LONGEST = 2048  # OPT's context length, which "Orca (Max)" reserves
SLOTS = 15_700  # for OPT-13B on a 40 GB A100 (the paper's table 1)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


# (prompt, output) -> slots reserved at once. Only the first can be built: the others
# know how long the answer will be.
SCHEMES: dict[str, Callable[[int, int], int]] = {
    "Max": lambda prompt, output: LONGEST,
    "Pow2": lambda prompt, output: min(LONGEST, prompt + power_of_two(output)),
    "Oracle": lambda prompt, output: prompt + output,
}


class Buddy:
    """The buddy allocator: pieces are powers of two, split in halves, merged again."""

    def __init__(self, slots: int) -> None:
        self._free: dict[int, set[int]] = {}  # size -> where free pieces start
        start = 0
        for bit in reversed(range(slots.bit_length())):
            if slots >> bit & 1:
                self._free[1 << bit] = {start}
                start += 1 << bit

    def take(self, n: int) -> tuple[int, int] | None:
        """(start, size) of a piece that holds `n` slots; None if there is none."""
        want = power_of_two(n)
        fitting = [size for size, at in self._free.items() if size >= want and at]
        if not fitting:
            return None
        size = min(fitting)
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > want:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return start, want

    def give_back(self, start: int, size: int) -> None:
        """Free a piece; merge it with its other half for as long as that is free."""
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self._free.setdefault(size, set()).add(start)


@dataclass(slots=True)
class Shares:
    """Slots summed over steps, by what they held; `slots` are those of the pool.

    `tokens`: keys and values. `later`: reserved, and filled before the request ends.
    `never`: reserved or held by a request, and never filled. What remains lies between
    requests: fragments, rounding, blocks that nobody holds.
    """

    slots: int
    steps: int = 0
    running: int = 0
    tokens: int = 0
    later: int = 0
    never: int = 0
    preemptions: int = 0

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """Tokens, later, never, between: shares of the pool that add up to 1."""
        whole = self.slots * max(1, self.steps)
        mine = [part / whole for part in (self.tokens, self.later, self.never)]
        return mine[0], mine[1], mine[2], 1 - sum(mine)

    @property
    def at_once(self) -> float:
        """Requests running at once, on average."""
        return self.running / max(1, self.steps)


@dataclass(slots=True)
class _Piece:
    """A running request: how far it is, where it ends, what it reserved and where."""

    computed: int
    end: int
    reserved: int
    piece: tuple[int, int]


def reserved(
    lengths: Sequence[tuple[int, int]], scheme: str, slots: int = SLOTS
) -> Shares:
    """Run requests of these (prompt, output) lengths, first come first served, each in
    one piece. Steps in which nobody waits are not counted."""
    pool, line, running = Buddy(slots), deque(lengths), list[_Piece]()
    shares = Shares(slots)
    while line:
        _admit(pool, line, running, SCHEMES[scheme])
        if line:
            shares.steps += 1
            shares.running += len(running)
            shares.tokens += sum(one.computed for one in running)
            shares.later += sum(one.end - one.computed for one in running)
            shares.never += sum(one.reserved - one.end for one in running)
        for one in running:
            one.computed += 1
            if one.computed == one.end:
                pool.give_back(*one.piece)
        running = [one for one in running if one.computed < one.end]
    return shares


def _admit(
    pool: Buddy,
    line: deque[tuple[int, int]],
    running: list[_Piece],
    scheme: Callable[[int, int], int],
) -> None:
    while line:
        prompt, output = line[0]
        need = scheme(prompt, output)
        piece = pool.take(need)
        if piece is None:
            return
        line.popleft()
        running.append(_Piece(prompt, prompt + output, need, piece))


def paged(
    lengths: Sequence[tuple[int, int]], block_size: int = 16, slots: int = SLOTS
) -> Shares:
    """The same requests through the real scheduler, with the prefix cache off. Steps in
    which nobody waits are not counted."""
    config = EngineConfig(
        block_size=block_size,
        num_blocks=slots // block_size + 1,
        max_num_batched_tokens=LONGEST,
        max_num_seqs=len(lengths),
        prefix_caching=False,
    )
    scheduler, shares = scheduler_for(config), Shares(slots)
    for i, (prompt, output) in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=output)
        scheduler.add(Request(str(i), [0] * prompt, params, prompt + output))

    def look() -> None:
        if scheduler.waiting:
            tokens = sum(request.computed for request in scheduler.running)
            shares.steps += 1
            shares.running += len(scheduler.running)
            shares.tokens += tokens
            shares.never += scheduler.tables.slots() - tokens

    while run_step(scheduler, look) is not None:
        pass
    shares.preemptions = scheduler.preemptions
    return shares
