"""An engine that says what the last message asks it to say: `SAY:` and the text.

Real in everything else: tokenizer, template, settings, metrics. The text comes in
pieces of one to seven tokens, so that a stream is cut where no parser likes it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import Any

from pagedattn.async_engine import AsyncEngine
from pagedattn.request import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

SAY, STOP = "SAY:", "<|end|>"
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if reasoning_effort %}<|system|>{{ reasoning_effort }}{% endif %}"
)


class Scripted:
    """An engine whose answers are in its prompts; the rest is the real one's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.last: SamplingParams | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, all siblings saying the same."""
        self.last = params
        ids = prompt["prompt_token_ids"]
        asked = self._engine.tokenizer.decode(ids, skip_special_tokens=False)
        text = asked.split(SAY)[-1].split(STOP)[0] if SAY in asked else "nothing"
        most = len(text) + 1 if params.max_tokens is None else params.max_tokens
        reason = "stop" if len(text) < most else "length"
        for piece, last in _pieces(text[:most], params):
            outputs = [
                self._output(i, piece, reason if last else None)
                for i in range(params.n)
            ]
            yield RequestOutput(request_id, None, ids, None, outputs, last, 0, None)

    def _output(self, index: int, text: str, reason: str | None) -> CompletionOutput:
        ids = self._engine.tokenizer.encode(text, add_special_tokens=False)
        return CompletionOutput(index, text, ids, None, None, reason, None)


def _pieces(text: str, params: SamplingParams) -> list[tuple[str, bool]]:
    if params.output_kind is RequestOutputKind.FINAL_ONLY or not text:
        return [(text, True)]
    draw, pieces = random.Random(text), []
    while text:
        size = draw.randint(1, 7)
        pieces.append((text[:size], len(text) <= size))
        text = text[size:]
    return pieces
