"""Prompts in every form that clients send them, made into token ids.

Knows tokenizer and chat template; long texts are worked on in a thread, so that the
event loop goes on. Knows nothing of sampling. Chats, `/tokenize` and everything else
take the same way, so that the same messages are the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pagedattn.serve.front import Front, Prompt, check_sequences
from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import TemplateFields
from pagedattn.text.template import ChatTemplate

T = TypeVar("T")

NO_TOOLS = (
    "This model's chat template has no tools; give one that has with --chat-template."
)
INLINE = 2_000  # characters; more are worked on in a thread
_RESERVED = frozenset(
    "messages tokenizer tools documents add_generation_prompt "
    "continue_final_message".split()
)


async def _away(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; done in a thread if `size` is large."""
    return work() if size <= INLINE else await asyncio.to_thread(work)


# Completions: text, ids, or a list of either.
async def completion_prompts(
    front: Front, value: Any, n: int, special: bool, cut: bool = False
) -> list[Prompt]:
    """The prompts of a completion request; 400 naming what is wrong with `prompt`."""
    items = _items(value)
    check_sequences(len(items), n)
    size = sum(len(item) for item in items if isinstance(item, str))
    return await _away(size, lambda: [_prompt(front, i, special, cut) for i in items])


def _items(value: Any) -> list[Any]:
    """A list of texts and lists of ids, whatever of the four forms `value` has."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ApiError(
            400, "prompt must be a string, token ids, or a list of either.", "prompt"
        )
    return [value] if isinstance(value[0], int) else value


def _prompt(front: Front, item: Any, special: bool, cut: bool) -> Prompt:
    if isinstance(item, str):
        return Prompt(encode(front, item, special, cut), item)
    if not isinstance(item, list):
        raise ApiError(400, "prompt mixes strings, ids and lists.", "prompt")
    if not all(type(token) is int for token in item):
        raise ApiError(400, "prompt holds what is no token id.", "prompt")
    return Prompt(_not_empty(item), None)


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise ApiError(400, "The prompt is empty: it has no tokens.", "prompt")
    return ids


def encode(front: Front, text: str, special: bool, cut: bool = False) -> list[int]:
    """Token ids of `text`; 400 if there are none.

    Unless the prompt will be `cut`, what is far too long is refused untokenized.
    """
    most = front.longest_text
    if most is not None and len(text) > most and not cut:
        raise ApiError(
            400,
            f"The prompt has {len(text)} characters; the context of "
            f"{front.engine.config.max_model_len} tokens holds at most {most}.",
            "prompt",
        )
    return _not_empty(front.tokenizer.encode(text, add_special_tokens=special))


# Chats: messages through the template.
async def chat_prompt(front: Front, body: TemplateFields) -> Prompt:
    """The rendered and tokenised conversation.

    Templates write their own BOS, so special tokens are added only if asked for.
    """
    if (
        body.chat_template is not None
        and not front.settings.trust_request_chat_template
    ):
        raise ApiError(
            400, "chat_template needs --trust-request-chat-template.", "chat_template"
        )
    return await _away(_size(body), lambda: _render(front, body))


def _size(body: TemplateFields) -> int:
    """About how many characters there are to render; parts, tools and templates of
    the client's count as long."""
    if body.chat_template is not None or body.tools:
        return INLINE + 1
    if not isinstance(body.messages, list):
        return 0
    contents = [m.get("content") for m in body.messages if isinstance(m, dict)]
    return sum(len(c) if isinstance(c, str) else INLINE for c in contents if c)


def _template(front: Front, body: TemplateFields) -> ChatTemplate:
    if body.chat_template is not None:
        return ChatTemplate(body.chat_template)
    return front.template or ChatTemplate(None)


def _render(front: Front, body: TemplateFields) -> Prompt:
    template = _template(front, body)
    extra = body.template_kwargs
    for name in _RESERVED & extra.keys():
        raise ApiError(
            400, f"chat_template_kwargs must not hold {name}.", "chat_template_kwargs"
        )
    _check_tool_calls(template, body.messages)
    tools = body.tool_dicts()
    if tools and not template.takes_tools:
        raise ApiError(400, NO_TOOLS, "tools")
    text = template.render(
        body.messages,
        tokenizer=front.tokenizer,
        add_generation_prompt=body.generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=tools,
        documents=body.documents,
        **extra,
    )
    cut = getattr(body, "truncate_prompt_tokens", None) is not None
    return Prompt(encode(front, text, bool(body.add_special_tokens), cut), text)


def _check_tool_calls(template: ChatTemplate, messages: Any) -> None:
    """Refuse earlier tool calls that the template would silently leave out."""
    if "tool_calls" in (template.source or "") or not isinstance(messages, list):
        return
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("tool_calls"):
            raise ApiError(
                400,
                f"messages[{i}].tool_calls: this model's chat template has no tools.",
                "messages",
            )


def last_text(messages: Any, role: str) -> str:
    """The last message's text if it is `role`'s, else nothing."""
    last = messages[-1]
    if last["role"] != role:
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(p if isinstance(p, str) else p["text"] for p in content)


async def plain_ids(front: Front, text: str, special: bool) -> list[int]:
    """Token ids of any text, none for an empty one."""
    tokenizer = front.tokenizer
    return await _away(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
    )
