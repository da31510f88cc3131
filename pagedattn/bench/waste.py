"""How much of the KV memory holds nothing: paged, and with the maximum reserved.

    python -m pagedattn.bench.waste

Runs the real scheduler and block tables over the mixed workload; what the tokens are
makes no difference to memory, so no model is needed and it takes a second. Chapter 03
reads these figures.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.bench.workloads import mixed_lengths, random_prompts
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams


@dataclass(slots=True)
class Waste:
    """Slot-steps, summed over every step: held by blocks, by a reservation, used."""

    used: int = 0
    paged: int = 0
    reserved: int = 0
    most_running: int = 0

    @property
    def paged_share(self) -> float:
        """Share of the allocated slots that hold nothing."""
        return 1 - self.used / self.paged

    @property
    def reserved_share(self) -> float:
        """The same, had each running request reserved the maximum length."""
        return 1 - self.used / self.reserved


def measure(
    lengths: list[tuple[int, int]], config: EngineConfig, reserve: int
) -> Waste:
    """Run requests of these (prompt, output) lengths to their end, all at once."""
    scheduler, waste = scheduler_for(config), Waste()
    prompts = random_prompts([prompt for prompt, _ in lengths], 50_000)
    for i, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=output)
        scheduler.add(Request(str(i), prompt, params, len(prompt) + output))

    def look() -> None:
        running = scheduler.running
        waste.used += sum(request.computed for request in running)
        waste.paged += scheduler.tables.slots()
        waste.reserved += reserve * len(running)
        waste.most_running = max(waste.most_running, len(running))

    while run_step(scheduler, look) is not None:
        pass
    return waste


def mixed(block_size: int, reserve: int) -> Waste:
    """Run the mixed workload with room for all, each of at most `reserve` tokens."""
    lengths = mixed_lengths()
    slots = len(lengths) * (reserve + block_size)
    config = EngineConfig(block_size=block_size, num_blocks=slots // block_size + 1)
    return measure(lengths, config, reserve)


def main() -> None:
    """Print the shares of wasted slots for the mixed workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument(
        "--max-model-len", type=int, default=2048, help="what a reservation holds"
    )
    args = parser.parse_args()
    waste = mixed(args.block_size, args.max_model_len)
    print(f"{len(mixed_lengths())} requests, {waste.most_running} at once")
    print(
        f"paged, blocks of {args.block_size}:     {waste.paged_share:6.1%} "
        "of the allocated slots hold nothing"
    )
    print(
        f"{args.max_model_len} slots reserved:    {waste.reserved_share:6.1%} "
        f"hold nothing: the same memory serves "
        f"{waste.reserved / waste.paged:.1f} times as many requests when paged"
    )


if __name__ == "__main__":
    main()
