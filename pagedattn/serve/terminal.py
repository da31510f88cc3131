"""`pagedattn chat` and `pagedattn complete`: a person at a terminal, and a server.

Knows OpenAI's streams, standard input and how to show Markdown as it grows. Ctrl-C
ends the answer that is being written, and at the prompt the session, as Ctrl-D does.
Talks HTTP with the standard library and imports nothing of the server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import Any

from pagedattn.errors import UserError

URL = "http://localhost:8000/v1"
KEYS = ("PAGEDATTN_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
PATIENCE = 600  # seconds without a byte after which a server is given up
Show = Callable[[str], None]
Choices = Generator[dict[str, Any], None, None]


def add_terminal(commands: Any) -> None:
    """Add both commands to the command line's."""
    chat = _add(commands, "chat", "talk to a running server")
    chat.add_argument("--system-prompt", help="what the model is told first")
    chat.add_argument(
        "-q", "--quick", metavar="MESSAGE", help="ask once, print the answer, end"
    )
    chat.set_defaults(command=_chat)
    complete = _add(commands, "complete", "have a running server continue texts")
    complete.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    complete.add_argument(
        "-q", "--quick", metavar="PROMPT", help="continue this, print it, end"
    )
    complete.set_defaults(command=_complete)


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("--url", default=URL, help=f"the server's API (default: {URL})")
    parser.add_argument("--model-name", help="the model; nothing: the server's first")
    parser.add_argument(
        "--api-key", help=f"its key; nothing: the environment's {', '.join(KEYS)}"
    )
    return parser


# The server.
class Server:
    """A running server: its URL, its key, and the model that is asked."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._url, self._key = url.rstrip("/"), key
        self.model = model or self._first_model()

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            asked = urllib.request.Request(self._url + path, data, headers)
            return urllib.request.urlopen(asked, timeout=PATIENCE)
        except urllib.error.HTTPError as problem:
            raise UserError(_told(problem.read(), problem.reason)) from None
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "reason", problem)
            raise UserError(f"no server at {self._url}: {reason}", "url") from None

    def _first_model(self) -> str:
        with self._open("/models") as answer:
            return json.load(answer)["data"][0]["id"]

    def stream(self, path: str, body: dict[str, Any]) -> Choices:
        """The choices of a streamed answer; closing it ends the work there."""
        body = {"model": self.model, "stream": True, **body}
        with self._open(path, body) as answer:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise UserError(_told(data, "error"))
                    yield from chunk["choices"][:1]


def _told(body: bytes, otherwise: Any) -> str:
    """What a server says is wrong."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered: {otherwise}"


def _server(args: argparse.Namespace) -> Server:
    found = [os.environ[name] for name in KEYS if os.environ.get(name)]
    return Server(args.url, args.api_key or next(iter(found), None), args.model_name)


# The commands.
def _chat(args: argparse.Namespace) -> int:
    server = _server(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        pieces = _contents(server.stream("/chat/completions", {"messages": messages}))
        messages.append({"role": "assistant", "content": written(pieces)})

    return _session(args.quick, answer)


def _contents(choices: Choices) -> Generator[str, None, None]:
    with closing(choices):
        for choice in choices:
            yield choice["delta"].get("content") or ""


def _texts(choices: Choices) -> Generator[str, None, None]:
    with closing(choices):
        for choice in choices:
            yield choice["text"]


def _complete(args: argparse.Namespace) -> int:
    server = _server(args)
    most = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}

    def answer(text: str) -> None:
        choices = server.stream("/completions", {"prompt": text, **most})
        written(_texts(choices), markdown=False)

    return _session(args.quick, answer)


def _session(quick: str | None, answer: Callable[[str], None]) -> int:
    """Answer `quick`, or line after line until the input ends."""
    if quick is not None:
        answer(quick)
        return 0
    if sys.stdin.isatty():
        print("Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    for text in _asked():
        try:
            answer(text)
        except UserError as problem:
            print(f"pagedattn: error: {problem}", file=sys.stderr)
    return 0


def _asked() -> Iterator[str]:
    """Lines that are not empty; a terminal shows that it waits for them."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt)
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip():
            yield text


# Showing an answer as it grows.
def written(pieces: Generator[str, None, None], markdown: bool = True) -> str:
    """Show pieces as they come, until the last or Ctrl-C; what there was of them."""
    text = ""
    with _shown(markdown) as show:
        try:
            for piece in pieces:
                text += piece
                show(piece)
        except KeyboardInterrupt:
            show(" …")
        finally:
            pieces.close()
    return text


@contextmanager
def _shown(markdown: bool) -> Iterator[Show]:
    """How to show a piece: as Markdown where a terminal and rich are there."""
    if markdown and sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.live import Live
        from rich.markdown import Markdown

        text: list[str] = []
        with Live(refresh_per_second=12, vertical_overflow="visible") as live:

            def grow(piece: str) -> None:
                text.append(piece)
                live.update(Markdown("".join(text)))

            yield grow
        return
    yield lambda piece: print(piece, end="", flush=True)
    print()
