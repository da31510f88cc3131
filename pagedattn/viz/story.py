"""The book's example: ten blocks of four tokens, and the people who want them.

Token ids stand for words, so that pictures can be read. Two readers ask about one
system prompt of exactly two blocks, a stranger asks something else; everything that
happens to them is done by the real scheduler. Chapter 00 tells the story.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagedattn.bench.dry import scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Plan, Result, Scheduler
from pagedattn.viz.film import Camera

WORDS = tuple(
    "You are a poet . Be brief : "  # the system prompt, 8 tokens
    "rain snow stars the a of on and softly falls night cold bright roof hill sea "
    "What is paged attention ? blocks tables cache keys values each one page maps "
    "to slot free".split()
)
SYSTEM = "You are a poet . Be brief :"
ANSWER = "softly the night falls and the cold stars bright on hill and sea".split()


def ids(text: str) -> list[int]:
    """The token ids of words that stand in `WORDS`, separated by spaces."""
    return [WORDS.index(word) for word in text.split()]


def word(token: int | None) -> str:
    """A token as its word; nothing for no token, the number for one without a word."""
    if token is None:
        return ""
    return WORDS[token] if token < len(WORDS) else str(token)


def request(name: str, text: str, answer: int = 6, **more: Any) -> Request:
    """A request for `answer` tokens after the words of `text`."""
    prompt = ids(text)
    params = SamplingParams(temperature=0, max_tokens=answer)
    return Request(name, prompt, params, len(prompt) + answer, **more)


def cast() -> list[Request]:
    """Ann and Bob, who share the system prompt, and Cyd, who does not."""
    return [
        request("Ann", f"{SYSTEM} rain on the roof"),
        request("Bob", f"{SYSTEM} snow on a hill ?"),
        request("Cyd", "What is paged attention ?"),
    ]


def stage(num_blocks: int = 10, **config: Any) -> tuple[Scheduler, Camera]:
    """The real scheduler over `num_blocks` blocks of four tokens, being filmed."""
    camera = Camera(word)
    settled = EngineConfig(**{"block_size": 4, "num_blocks": num_blocks + 1, **config})
    scheduler = scheduler_for(settled, camera.emit)
    camera.watch(scheduler)
    return scheduler, camera


def results(scheduler: Scheduler, plan: Plan) -> list[Result]:
    """What a model would have sampled: each answer goes through `ANSWER` in order."""
    said = {r.id: r.num_output for r in (*scheduler.running, *scheduler.waiting)}
    return [
        Result(
            ids(ANSWER[said.get(item.request_id, 0) % len(ANSWER)])[0]
            if item.samples
            else None
        )
        for item in plan.items
    ]


def play(
    scheduler: Scheduler, camera: Camera, requests: Iterable[Request], steps: int = 99
) -> list[Plan]:
    """Add `requests` and run up to `steps` steps; the plans that were made."""
    for one in requests:
        scheduler.add(one)
    plans: list[Plan] = []
    while len(plans) < steps and (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, results(scheduler, plan))
        camera.tick()
        plans.append(plan)
    return plans


def words(tokens: Sequence[int]) -> str:
    """Token ids as one line of words."""
    return " ".join(word(token) for token in tokens)
