"""The demo model behind a live server: many unmodified clients at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serve_live import Live, serving

from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs

STREAMS, TOKENS = 64, 6


@pytest.fixture(scope="module")
def live(demo_gguf: Path) -> Iterator[Live]:
    args = EngineArgs(
        str(demo_gguf),
        served_model_name=["tiny"],
        max_model_len=512,
        num_gpu_blocks_override=800,
    )
    engine = AsyncEngine.from_args(args)
    with serving(engine) as live:
        yield live
    engine.shutdown()


def question(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {i} plus {i}?"}]


def test_64_streams_at_once(live: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, str | None, int]:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=question(i),
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, reason, used = "", None, 0
        async for chunk in stream:
            used = chunk.usage.completion_tokens if chunk.usage else used
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        return text, reason, used

    async def run() -> list[tuple[str, str | None, int]]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x") as c:
            return await asyncio.gather(*(ask(c, i) for i in range(STREAMS)))

    answers = asyncio.run(run())
    live.wait_idle()
    for text, reason, used in answers:
        assert text and reason in ("length", "stop")
        assert used == TOKENS or reason == "stop"
    for i in (0, 31, 63):  # alone, float32: the same words
        alone = live.chat(messages=question(i), max_tokens=TOKENS)["choices"][0]
        assert alone["message"]["content"] == answers[i][0]
    live.wait_idle()


def test_it_can_answer(live: Live) -> None:
    """Greedy, so it always says this or something else went wrong."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = live.chat(messages=messages, max_tokens=12)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    live.wait_idle()


def test_it_answers_in_the_form_that_was_asked(live: Live) -> None:
    """Sense from the model, form from the grammar; a seed gives the same again."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "country": {"enum": ["France", "Spain", "Italy"]},
        },
        "required": ["city", "country"],
    }
    named = {"name": "place", "schema": schema, "strict": True}
    messages = [{"role": "user", "content": "What is the capital of France? As JSON."}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 1.0, "seed": 1}
    wish = {"response_format": {"type": "json_schema", "json_schema": named}}
    choice = live.chat(**body, **wish)["choices"][0]
    assert choice["finish_reason"] == "stop"
    place = json.loads(choice["message"]["content"])
    assert set(place) == {"city", "country"}
    assert place["country"] in ("France", "Spain", "Italy")
    assert live.chat(**body, **wish)["choices"][0] == choice
    yes = live.chat(**body, structured_outputs={"choice": ["Paris", "Rome"]})
    assert yes["choices"][0]["message"]["content"] in ("Paris", "Rome")
    live.wait_idle()
