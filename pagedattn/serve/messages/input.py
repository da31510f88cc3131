"""`/v1/messages`: Anthropic's turns and content blocks as chat messages.

Knows the blocks' shapes and the rule that turns of one role in a row are one turn;
nothing of sampling or of answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagedattn.serve.to_chat import list_of, object_of, refuse, text_of

Message = dict[str, Any]
Block = tuple[dict[str, Any], str]  # and where it stands in the body
ROLES = ("user", "assistant", "system")
# Claude Code's first system block, other in every request: it would spoil every hit.
_BILLING = "x-anthropic-billing-header:"


def to_messages(messages: Any, system: Any) -> tuple[list[Message], bool]:
    """The chat, and whether the answer goes on with its last message.

    400 that names the first block that can't be said in a chat.
    """
    turns = _turns(messages)
    chat = _system(system)
    calls: set[str] = set()
    for role, blocks in turns:
        if role == "assistant":
            chat.append(_assistant(blocks, calls))
        elif role == "system":
            chat.append({"role": "system", "content": _texts(blocks)})
        else:
            chat += _user(blocks, calls)
    last = chat[-1]
    return chat, last["role"] == "assistant" and "tool_calls" not in last


def _system(system: Any) -> list[Message]:
    if system is None:
        return []
    blocks = [b for b in _blocks(system, "system") if not _bills(b)]
    text = _texts(blocks)
    return [{"role": "system", "content": text}] if text else []


def _bills(block: Block) -> bool:
    return str(block[0].get("text")).startswith(_BILLING)


def _turns(messages: Any) -> list[tuple[str, list[Block]]]:
    """Roles and their blocks, turns of one role in a row joined."""
    if not isinstance(messages, list) or not messages:
        refuse("messages", "must be a list of messages, and not empty")
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = object_of(message, where).get("role")
        if role not in ROLES:
            refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        blocks = list(_blocks(message.get("content"), f"{where}.content"))
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(content: Any, where: str) -> Iterator[Block]:
    """The blocks of a string or a list, each with its place."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    for i, block in enumerate(list_of(content, where)):
        yield object_of(block, f"{where}[{i}]"), f"{where}[{i}]"


def _assistant(blocks: list[Block], calls: set[str]) -> Message:
    """One message of an assistant's thoughts, text and calls."""
    message: Message = {"role": "assistant", "content": None}
    texts, thoughts = [], []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(text_of(block.get("text"), f"{where}.text"))
            case "thinking":
                thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
            case "redacted_thinking":  # readable to its maker only
                pass
            case "tool_use":
                call = _call(block, where)
                calls.add(call["id"])
                message.setdefault("tool_calls", []).append(call)
            case kind:
                _unsupported(kind, where)
    if texts or not message.get("tool_calls"):
        message["content"] = "".join(texts)
    return {**message, "reasoning": "".join(thoughts)} if thoughts else message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = object_of(block.get("input"), f"{where}.input")
    function = {
        "name": text_of(block.get("name"), f"{where}.name"),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    call_id = text_of(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": function}


def _user(blocks: list[Block], calls: set[str]) -> list[Message]:
    """A user's turn: results of calls are messages of their own, texts in between."""
    messages: list[Message] = []
    texts: list[Block] = []
    for block, where in blocks:
        if block.get("type") != "tool_result":
            texts.append((block, where))
            continue
        messages += _said(texts)
        texts = []
        messages.append(_result(block, where, calls))
    return messages + _said(texts) if texts or not messages else messages


def _said(texts: list[Block]) -> list[Message]:
    return [{"role": "user", "content": _texts(texts)}] if texts else []


def _result(block: dict[str, Any], where: str, calls: set[str]) -> Message:
    call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
    if call_id not in calls:
        refuse(f"{where}.tool_use_id", "answers no tool_use before it")
    content = block.get("content")
    text = "" if content is None else _texts(_blocks(content, f"{where}.content"))
    if block.get("is_error") is True:  # chats have no other place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _texts(blocks: Any) -> str:
    return "\n".join(_text(block, where) for block, where in blocks)


def _text(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text":
        _unsupported(block.get("type"), where)
    return text_of(block.get("text"), f"{where}.text")


def _unsupported(kind: Any, where: str) -> None:
    refuse(f"{where}.type", f"{str(kind)[:40]!r} is not supported here")
