"""`pagedattn run-batch`: a file of requests in, a file of answers out, no server.

Knows OpenAI's batch lines and which URLs there are; a line that fails fails alone.
Lines are read as they are needed, so that memory holds a window of them, whatever the
file's size; the output appears whole, at the end, or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from pagedattn.config import add_flags, args_from
from pagedattn.errors import UserError
from pagedattn.serve.settings import ServeArgs

AHEAD = 2  # lines under way for each sequence that the engine runs at once
_SEGMENT = 1 << 20

Answer = Callable[[Any, Any, str], Awaitable[Any]]


def add_run_batch(commands: Any) -> None:
    """Add the command to the command line's."""
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests, OpenAI's batch format",
        description="Answer each line of a batch file; no server is started.",
    )
    parser.add_argument("-i", "--input-file", required=True, help="JSON lines to read")
    parser.add_argument("-o", "--output-file", required=True, help="file to write")
    parser.add_argument(
        "--chat-template", help="a file with, or the text of, a template"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_flags(parser)
    parser.set_defaults(command=_run_batch)


def _run_batch(args: argparse.Namespace) -> int:
    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        raise UserError(f"--input-file {str(source)!r}: no such file.", "input_file")
    if not target.parent.is_dir():
        raise UserError(f"--output-file: no folder {str(target.parent)!r}.")
    settings = ServeArgs(chat_template=args.chat_template)
    from pagedattn import AsyncEngine
    from pagedattn.encoder_engine import EncoderEngine, wants_encoder
    from pagedattn.serve.front import front_for

    engine_args = args_from(args)
    kind = EncoderEngine if wants_encoder(engine_args) else AsyncEngine
    engine = kind.from_args(engine_args, show_progress=sys.stderr.isatty())
    try:
        front = front_for(engine, settings)
        show = not args.disable_tqdm
        lines, failed = asyncio.run(run(front, source, target, show))
    finally:
        engine.shutdown()
    print(f"{lines} lines, {failed} failed: {target}")
    return 0


async def run(front: Any, source: Path, target: Path, show: bool) -> tuple[int, int]:
    """Answer the lines of `source` into `target`, in their order: (lines, failures).

    `target` is replaced once everything is written, and left alone if this fails.
    """
    window = AHEAD * front.engine.config.max_num_seqs
    size, lines, failed = source.stat().st_size, 0, 0
    with (
        source.open("rb") as read,
        _replaced(target) as write,
        tqdm(total=size, unit="B", unit_scale=True, disable=not show) as bar,
    ):
        async for line, answer in _in_order(front, read, window):
            write.write(json.dumps(answer, ensure_ascii=False) + "\n")
            bar.update(line)
            lines += 1
            failed += answer["error"] is not None
    return lines, failed


@contextmanager
def _replaced(target: Path) -> Iterator[IO[str]]:
    """A file that becomes `target` if all goes well, and is removed if not."""
    parted = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with parted.open("w", encoding="utf-8") as file:
            yield file
        os.replace(parted, target)
    finally:
        parted.unlink(missing_ok=True)


async def _in_order(
    front: Any, read: IO[bytes], window: int
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """(bytes read, answer) of each line, at most `window` of them under way."""
    limit = front.settings.max_body_bytes
    tasks: deque[tuple[int, asyncio.Task[dict[str, Any]]]] = deque()
    try:
        for raw in _lines(read, limit):
            size = len(raw)
            if raw.strip():
                task = asyncio.ensure_future(answered(front, raw, limit))
                tasks.append((size, task))
            if len(tasks) >= window:
                size, task = tasks.popleft()
                yield size, await task
        while tasks:
            size, task = tasks.popleft()
            yield size, await task
    finally:
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)


def _lines(read: IO[bytes], limit: int) -> Iterator[bytes]:
    """Lines; of one that is longer than `limit` only so much that it shows."""
    while line := read.readline(limit + 1):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = read.readline(_SEGMENT)
        yield line


async def answered(front: Any, raw: bytes, limit: int) -> dict[str, Any]:
    """The output line of one input line; a failure is told in it."""
    from pagedattn.serve.problems import ApiError, as_api_error
    from pagedattn.serve.protocol import parse_json

    custom_id, request_id = None, f"batch-{uuid.uuid4().hex}"
    answer: dict[str, Any] = {"id": request_id, "custom_id": None, "response": None}
    response: dict[str, Any] = {"status_code": 200, "request_id": request_id}
    try:
        if len(raw) > limit:
            raise ApiError(413, f"The line has more than {limit} bytes.")
        line = parse_json(raw)
        custom_id = line.get("custom_id")
        answer["custom_id"] = custom_id
        response["body"] = await _answer(front, line, request_id)
        error = None
    except Exception as problem:
        told = as_api_error(problem)
        response |= {"status_code": told.status, "body": None}
        error = told.body()["error"]
    return {**answer, "response": response, "error": error}


async def _answer(front: Any, line: dict[str, Any], request_id: str) -> Any:
    """The body of the answer to one line; ApiError where there is none."""
    from pagedattn.serve.problems import ApiError
    from pagedattn.serve.protocol import parse

    routes = _routes()
    if not isinstance(line.get("custom_id"), str):
        raise ApiError(400, "custom_id must be a string.", "custom_id")
    if line.get("method", "POST") != "POST":
        raise ApiError(400, "method must be POST.", "method")
    if line.get("url") not in routes:
        raise ApiError(400, f"url must be one of {', '.join(routes)}.", "url")
    model, work = routes[line["url"]]
    body = parse(model, json.dumps(line.get("body")).encode())
    if getattr(body, "stream", None):
        raise ApiError(400, "stream must be false in a batch.", "stream")
    made = await work(front, body, request_id)
    return made if isinstance(made, dict) else json.loads(bytes(made.body))


def _routes() -> dict[str, tuple[type[Any], Answer]]:
    """What a line may ask for: URL -> its body and who answers it."""
    from pagedattn.serve import chat, completions
    from pagedattn.serve.pooling import bodies, embeddings, scoring
    from pagedattn.serve.protocol import ChatBody, CompletionBody

    score, rerank = (
        (bodies.ScoreBody, scoring.score),
        (bodies.RerankBody, scoring.rerank),
    )
    return {
        "/v1/chat/completions": (ChatBody, chat.whole),
        "/v1/completions": (CompletionBody, completions.whole),
        "/v1/embeddings": (bodies.EmbeddingBody, embeddings.whole),
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
    }
