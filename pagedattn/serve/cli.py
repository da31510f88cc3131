"""The command line: `pagedattn serve [MODEL]`, `chat`, `run-batch`, `bench` and kin.

Knows flags, exit codes and the banner. A mistake is one line on stderr and exit code
2, whatever stopped the start one line and 1; tracebacks only with --log-level debug.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagedattn.bench.cli import add_bench
from pagedattn.config import EngineArgs, add_flags, args_from
from pagedattn.errors import UserError
from pagedattn.serve.batch import add_run_batch
from pagedattn.serve.logs import set_up_logging
from pagedattn.serve.settings import ServeArgs, add_serve_flags, serve_args_from
from pagedattn.serve.sockets import listen, url_of
from pagedattn.serve.terminal import add_terminal
from pagedattn.student import active, notice
from pagedattn.version import __version__

log = logging.getLogger("pagedattn")

INTERRUPTED = 130  # what shells expect after Ctrl-C
MISTAKE, FAILED = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = build_parser()
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    debug = getattr(args, "log_level", "") == "debug"
    try:
        return args.command(args)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, False)
    except UserError as problem:
        return _fail(str(problem), MISTAKE, debug)
    except Exception as problem:
        return _fail(f"{type(problem).__name__}: {problem}", FAILED, debug)


def _fail(message: str, code: int, traceback: bool) -> int:
    if traceback:
        log.exception("traceback")
    print(f"pagedattn: error: {message}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `command`, a function of the namespace."""
    parser = argparse.ArgumentParser("pagedattn", description="Serve language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI's protocol",
        description="Serve a model over HTTP. With no model named: SmolLM2-135M.",
    )
    serve.add_argument(
        "named", nargs="?", metavar="MODEL", help="folder, hub id or .gguf file"
    )
    add_flags(serve)
    add_serve_flags(serve)
    serve.set_defaults(command=_serve)
    kernels = commands.add_parser(
        "download-kernels", help="compile the kernels into the user's cache now"
    )
    kernels.add_argument(
        "--arch",
        metavar="sm_90",
        help="Triton's kernels for a GPU, which need not be here: sm_80, sm_90, sm_100",
    )
    kernels.add_argument(
        "--model",
        help="with --arch, for a model's sizes: folder, hub id or .gguf; default: "
        "Qwen3-8B's, which `bench gpu` uses",
    )
    kernels.set_defaults(command=_compile_kernels)
    add_run_batch(commands)
    add_terminal(commands)
    add_bench(commands)
    return parser


def settings_from(args: argparse.Namespace) -> tuple[EngineArgs, ServeArgs]:
    """Both kinds of settings; UserError if MODEL and --model disagree."""
    if args.named is not None and args.model not in (None, args.named):
        raise UserError(
            f"MODEL={args.named!r} and --model {args.model!r} disagree.", "model"
        )
    args.model = args.named or args.model
    return args_from(args), serve_args_from(args)


# Serving: take the port, load the model, say so, serve.
def _serve(args: argparse.Namespace) -> int:
    engine_args, settings = settings_from(args)
    set_up_logging(settings.log_level, settings.structured_logs)
    with listen(settings.host, settings.port) as bound:
        from pagedattn import AsyncEngine
        from pagedattn.encoder_engine import EncoderEngine, wants_encoder

        # While weights load, which leaves the interpreter free, the web part comes in.
        web = threading.Thread(target=import_module, args=("pagedattn.serve.server",))
        web.start()
        kind = EncoderEngine if wants_encoder(engine_args) else AsyncEngine
        engine = kind.from_args(engine_args, show_progress=sys.stderr.isatty())
        try:
            web.join()
            from pagedattn.serve.app import build_app
            from pagedattn.serve.server import Server

            app = build_app(engine, settings)
            server = Server(app, not engine_args.disable_log_stats)
            keyed = bool(settings.keys())
            names = app.state.front.names
            url = url_of(bound, settings.tls)
            print(banner(engine.facts, names, url, keyed))
            sys.stdout.flush()
            gc.freeze()  # what was loaded stays: to look through it takes 0.1 s
            server.run(sockets=[bound])
        finally:
            engine.shutdown()
    return FAILED if server.engine_died else 0


def banner(
    facts: dict[str, str], names: list[str], url: str, keyed: bool = False
) -> str:
    """What a start says: the model, how it runs, its pool, and how to ask it."""
    if "num_gpu_blocks" not in facts:
        return _encoder_banner(facts, names, url, keyed)
    blocks, size = int(facts["num_gpu_blocks"]), int(facts["block_size"])
    length = int(facts["max_model_len"])
    cache = int(facts["kv_cache_bytes"]) / (1 << 30)
    message = {"role": "user", "content": "Hi"}
    body = json.dumps({"model": names[0], "messages": [message]})
    rows = (
        ("model", f"{', '.join(names)} ({facts['architecture']})"),
        ("dtype", facts["dtype"]),
        ("linear layers", f"{facts['linear']}, {facts['threads']} threads"),
        ("other kernels", facts["kernels"]),
        (
            "KV pool",
            f"{blocks} blocks of {size} tokens, {blocks * size} ({cache:.1f} GiB)",
        ),
        ("longest request", f"{length} tokens"),
        ("concurrency", f"{blocks * size / length:.1f} requests at full length"),
        *([("reader's code", notice(active()))] if active() else []),
        ("address", url),
    )
    lines = [f"pagedattn {__version__}", *(f"  {k:16} {v}" for k, v in rows)]
    curl = f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    return "\n".join([*lines, f"{curl}{key} -d '{body}'"])


def _encoder_banner(
    facts: dict[str, str], names: list[str], url: str, keyed: bool
) -> str:
    """The same for an encoder, which has no pool."""
    rows = (
        ("model", f"{', '.join(names)} ({facts['architecture']})"),
        ("linear layers", f"{facts['linear']}, {facts['threads']} threads"),
        ("embeddings", f"{facts['hidden_size']} numbers, pooling {facts['pooling']}"),
        ("longest text", f"{facts['max_model_len']} tokens"),
        ("address", url),
    )
    lines = [f"pagedattn {__version__}", *(f"  {k:16} {v}" for k, v in rows)]
    body = json.dumps({"model": names[0], "input": "Hi"})
    curl = f"  curl {url}/v1/embeddings -H 'Content-Type: application/json'"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    return "\n".join([*lines, f"{curl}{key} -d '{body}'"])


# Kernels.
def _compile_kernels(args: argparse.Namespace) -> int:
    from pagedattn.kernels import cpu

    arch = args.arch or _arch_here()
    if not args.arch:
        with _progress("Kernels") as show:
            cpu.compile_all(show)
        print(f"kernels are in {cpu.cache_dir()}")
    if arch:
        with _progress(f"Kernels for {arch}") as show:
            print(f"kernels are in {_compile_for(arch, show, args.model)}")
    return 0


def _arch_here() -> str | None:
    """The architecture of this machine's GPU, if Triton is here to compile for it."""
    import torch

    if not torch.cuda.is_available() or find_spec("triton") is None:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _compile_for(
    arch: str, show: Callable[[str, int, int], None], model: str | None = None
) -> Path:
    """Compile Triton's kernels for a model's sizes; the folder that they are in."""
    if find_spec("triton") is None:
        raise UserError("--arch needs Triton: pip install 'pagedattn[gpu]'.", "arch")
    from pagedattn.kernels.gpu import launch, report

    if arch not in report.SHARED:
        known = ", ".join(report.SHARED)
        raise UserError(f"--arch {arch}: unknown. There are: {known}.", "arch")
    sizes = report.MODELS if model is None else (_sizes_of(model),)
    report.compile_all(arch, show, models=sizes)
    return launch.cache_dir()


def _sizes_of(model: str) -> Any:
    """What kernels are compiled for, of a model's configuration."""
    from pagedattn.assembly import dtype_on_card
    from pagedattn.kernels.gpu import report
    from pagedattn.model import loader, source

    found = loader.load_config(source.resolve(model))
    c = loader.decoder_config(found)
    return report.Model(
        c.heads,
        c.kv_heads,
        c.head_dim,
        c.hidden_size,
        c.intermediate_size,
        c.vocab_size,
        c.softcap,
        dtype=dtype_on_card("auto", found.get("dtype") or found.get("torch_dtype")),
    )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, fed with (name, done, of)."""
    from tqdm import tqdm

    with tqdm(desc=title) as bar:

        def show(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield show
