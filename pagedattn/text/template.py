"""Chat messages to one prompt string, through a model's own Jinja template.

Knows the environment that Hugging Face templates expect and the shapes in which
clients send messages. Does not know token ids; templates are untrusted, so they run
in jinja2's immutable sandbox, within bounds.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pagedattn.errors import NotSupported, UserError
from pagedattn.text.bounds import BUDGET, BoundedEnvironment, Budget, joined
from pagedattn.text.tokenizer import Tokenizer

Message = dict[str, Any]

# Marks where the last message ends; the space tells whether the template trimmed it.
_END = "END_OF_THE_MESSAGE_TO_CONTINUE "
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text"}
_TEXT_PARTS |= {"refusal": "refusal"}


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks training data; here it is its
    body, with its own scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One template, compiled once; rendering changes nothing in it.

    A `source` of None is a model without a template: rendering then says how to give
    one. Raises UserError for a source that is not valid Jinja.
    """

    def __init__(
        self, source: str | None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._compiled = None
        self.takes_tools = False
        if source is None:
            return
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            ticking = environment.bounded(environment.parse(source))
            self._compiled = environment.from_string(ticking)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"chat template, line {error.lineno}: {error.message}",
                param="chat_template",
            ) from error
        self._wants_parts = _loops_over_content(tree)
        self._takes_strings = not self._wants_parts or _tests_for_string(tree)
        self.takes_tools = "tools" in meta.find_undeclared_variables(tree)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        /,
        *,
        tokenizer: Tokenizer | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Iterable[Mapping[str, Any]] | None = None,
        documents: Iterable[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, as transformers' apply_chat_template renders it.

        Text holds its own special tokens: encode with add_special_tokens=False.
        `continue_final_message` leaves the last, an assistant's, message open: no end
        of turn after its text (less trailing space where the template trims it).
        `tokenizer` supplies bos_token and the like; `kwargs` reach the template.
        Nothing given is changed; iterables are read once. Raises UserError with the
        template's own words where it refuses the messages.
        """
        if self._compiled is None:
            raise UserError(
                "this model has no chat template; start the server with "
                "--chat-template FILE, or use completions",
                param="messages",
            )
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt can't both be true",
                param="continue_final_message",
            )
        chat = self.conversation(messages)
        if continue_final_message:
            _mark_end(chat[-1])
        variables = {} if tokenizer is None else dict(tokenizer.special_tokens)
        prompt = self._render(
            variables
            | _plain(kwargs)
            | {
                "messages": chat,
                "tools": _plain(tools),
                "documents": _plain(documents),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_end(prompt) if continue_final_message else prompt

    def conversation(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        """The messages as the template sees them: plain fresh dicts and lists.

        Text parts become one string where the template wants strings (joined by
        newlines), and strings a part where it wants parts; tool-call arguments are
        decoded from JSON; role developer is system unless the template names it; what
        an assistant thought is there as `reasoning` and as `reasoning_content`.
        Raises UserError for an empty conversation or a malformed message.
        """
        chat = _plain(messages)
        if not isinstance(chat, list) or not chat:
            raise UserError("messages must be a non-empty list", param="messages")
        return [self._message(i, message) for i, message in enumerate(chat)]

    def _message(self, index: int, message: Any) -> Message:
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} has no role", param=where)
        if message["role"] == "developer" and not self._knows_developer:
            message["role"] = "system"
        message["content"] = self._content(message.get("content"), f"{where}.content")
        for call in message.get("tool_calls") or ():
            _decode_arguments(call, f"{where}.tool_calls")
        # Clients and templates call an earlier thought by either name.
        if thought := message.get("reasoning") or message.get("reasoning_content"):
            message["reasoning"] = message["reasoning_content"] = thought
        return {name: value for name, value in message.items() if value is not None}

    def _content(self, content: Any, where: str) -> str | list[Message]:
        if content is None:
            content = ""
        if isinstance(content, str):
            text_part = {"type": "text", "text": content}
            return content if self._takes_strings else [text_part]
        if not isinstance(content, list):
            raise UserError(f"{where} must be a string or a list", param=where)
        texts = [_part_text(part, where) for part in content]
        if self._wants_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _render(self, variables: Mapping[str, Any]) -> str:
        """What a template raises, by its own word or by a slip, is the caller's to
        see: it may refuse the messages."""
        try:
            return joined(self._compiled.generate({**variables, BUDGET: Budget()}))
        except UserError:
            raise
        except jinja2.TemplateError as error:
            raise UserError(str(error), param="messages") from error
        except Exception as error:
            kind = type(error).__name__
            raise UserError(
                f"the chat template failed on these messages: {kind}: {error}",
                param="messages",
            ) from error


# The environment that templates expect.


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# What a template wants, read from its syntax tree.


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether it iterates over a message's content, or over a variable set to it; a
    macro's parameter is called content by custom."""
    names = {"content"} | {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    """`x.content`, `x['content']`, also behind filters."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    is_item = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)
    return is_item and node.arg.value == "content"


def _tests_for_string(tree: nodes.Template) -> bool:
    return any(test.name == "string" for test in tree.find_all(nodes.Test))


# Messages, as clients send them.


def _plain(value: Any) -> Any:
    """Fresh dicts, lists and scalars; one-shot iterables become lists, models dicts."""
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return value


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise NotSupported(
            f"{where}: part type {kind!r} is not supported by this text model; "
            f"supported are {', '.join(_TEXT_PARTS)}",
            param=where,
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise UserError(f"{where}: a {kind} part without text", param=where)
    return text


def _decode_arguments(call: Any, where: str) -> None:
    """Clients send arguments as JSON text; templates write them out as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise UserError(f"{where}: an entry without a function", param=where)
    if not isinstance(arguments := function.get("arguments"), str):
        return
    try:
        function["arguments"] = json.loads(arguments) if arguments else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: arguments are not JSON: {error}", where) from error


# Continuing the last message.


def _mark_end(message: Message) -> None:
    if message["role"] != "assistant":
        raise UserError(
            "continue_final_message needs a last message of role 'assistant', "
            f"not {message['role']!r}",
            param="continue_final_message",
        )
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _END
    elif content:
        content[-1]["text"] += _END
    else:
        raise UserError("the last message has no text", param="continue_final_message")


def _cut_at_end(prompt: str) -> str:
    """The prompt up to the mark; where the template trimmed, without trailing space."""
    at = prompt.rfind(_END.strip())
    if at == -1:
        raise UserError(
            "the chat template does not show the last message: it can't be continued",
            param="continue_final_message",
        )
    kept = prompt[:at]
    return kept if prompt.startswith(_END, at) else kept.rstrip()
