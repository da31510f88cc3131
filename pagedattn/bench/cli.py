"""`pagedattn bench throughput | latency | serve | ceilings | ladder`.

Knows flags, under vLLM's names where vLLM has them, and what a run needs; the work is
in `offline`, `online`, `profile`, `ceilings` and `ladder`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pagedattn.bench.datasets import DATASETS, Wanted, samples
from pagedattn.bench.timeline import METRICS, parse_goals, summary
from pagedattn.config import EngineArgs, add_flags, args_from
from pagedattn.errors import UserError

SHOWN = ",".join(METRICS)


def add_bench(commands: Any) -> None:
    """Add `bench` and its own commands to the parser of all commands."""
    bench = commands.add_parser("bench", help="measure the engine or any server")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    throughput = _command(kinds, "throughput", _throughput, "many requests at once")
    _add_dataset(throughput)
    _add_offline(throughput)
    _add_report(throughput)
    add_flags(throughput)
    latency = _command(kinds, "latency", _latency, "one batch, over and over")
    for name, default, help in (
        ("--input-len", 32, "tokens in each prompt"),
        ("--output-len", 128, "tokens in each answer"),
        ("--batch-size", 8, "requests in the batch"),
        ("--num-iters-warmup", 10, "batches that are not counted"),
        ("--num-iters", 30, "batches that are"),
    ):
        latency.add_argument(name, type=int, default=default, help=help)
    _add_offline(latency)
    add_flags(latency)
    latency.set_defaults(enable_prefix_caching=False)
    _add_serve(_command(kinds, "serve", _serve, "a running server, over HTTP"))
    gpu = _command(kinds, "gpu", _gpu, "kernels and the engine on an NVIDIA card")
    gpu.add_argument(
        "--result-dir", type=Path, default=Path("book/measured"), help="gpu.json, .png"
    )
    _command(kinds, "ceilings", _ceilings, "what this machine can do at most")
    _add_ladder(_command(kinds, "ladder", _ladder, "what each idea is worth here"))
    _command(kinds, "growth", _growth, "a step's overhead while more stands around it")
    _add_compare(_command(kinds, "compare", _compare, "engines side by side, a table"))


def _command(
    kinds: Any, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name, help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(command=run)
    return parser


# Flags.
def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", type=Path, help="ShareGPT JSON, or JSON lines")
    group.add_argument("--num-prompts", type=int, default=1000)
    group.add_argument("--input-len", "--random-input-len", type=int)
    group.add_argument("--output-len", "--random-output-len", type=int)
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by ±"
    )
    group.add_argument("--random-prefix-len", type=int, default=0)
    for name, default in (
        ("prefix-len", 256),
        ("suffix-len", 256),
        ("num-prefixes", 10),
        ("output-len", 128),
    ):
        group.add_argument(f"--prefix-repetition-{name}", type=int, default=default)


def _add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", type=Path, help="write the result here")
    parser.add_argument("--disable-detokenize", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a Chrome trace, and a table"
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--percentile-metrics", default=SHOWN, help="of " + SHOWN)
    group.add_argument(
        "--metric-percentiles", default="90,99", help="beside the median"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these limits: ttft:500 tpot:50 e2el:9000",
    )
    group.add_argument("--plot", type=Path, help="draw the run into this PNG")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=("openai", "openai-chat"), default="openai"
    )
    parser.add_argument("--base-url", help="instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--endpoint", help="another path than the backend's")
    parser.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument(
        "--tokenizer", help="folder, hub id or .gguf; default: the demo's"
    )
    parser.add_argument("--seed", type=int, default=0)
    _add_dataset(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"))
    load.add_argument("--burstiness", type=float, default=1.0)
    load.add_argument("--max-concurrency", type=int)
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    load.add_argument("--ramp-up-start-rps", type=float)
    load.add_argument("--ramp-up-end-rps", type=float)
    load.add_argument("--ignore-eos", action="store_true")
    load.add_argument("--temperature", type=float)
    load.add_argument("--top-p", type=float)
    load.add_argument("--top-k", type=int)
    load.add_argument("--num-warmups", type=int, default=0)
    _add_report(parser)
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument("--save-result", action="store_true")
    parser.add_argument("--save-detailed", action="store_true")
    parser.add_argument("--result-dir", type=Path, default=Path())
    parser.add_argument("--result-filename")


def _add_ladder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder, hub id or .gguf; default: the demo's")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument(
        "--prefix-len", type=int, default=48, help="tokens that all prompts begin with"
    )
    parser.add_argument("--output-json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="draw the staircase into this PNG")
    parser.add_argument("--disable-tqdm", action="store_true")


# The commands.
def _throughput(args: argparse.Namespace) -> int:
    goals, percentiles, shown = _wanted_report(args)
    engine = _engine(args_from(args))
    chosen = samples(_wanted(args), engine.tokenizer)
    from pagedattn.bench import offline, report
    from pagedattn.bench.profile import Profile

    profile = Profile() if args.profile else None
    before = offline.counters_of(engine)
    with profile.attached(engine) if profile else nullcontext():
        timelines, usage, seconds = offline.run(
            engine, chosen, not args.disable_detokenize, not args.disable_tqdm
        )
    result = summary(timelines, seconds, percentiles, goals)
    result |= offline.cache_report(engine, usage, before)
    print(report.table(result, "Throughput Benchmark Result", shown))
    _finish(args, result, timelines, profile)
    return 0


def _gpu(args: argparse.Namespace) -> int:
    from pagedattn.device.cuda import choose_device

    choose_device("cuda")
    from pagedattn.bench import gpu, gpu_report

    found = gpu.run()
    print(found.table())
    for path in gpu_report.write(found, args.result_dir):
        print(f"wrote {path}")
    return 0 if all(check.passed for check in found.checks) else 1


def _latency(args: argparse.Namespace) -> int:
    if args.num_iters < 1 or args.batch_size < 1:
        raise UserError("num_iters and batch_size must be at least 1.", "num_iters")
    engine = _engine(args_from(args))
    wanted = Wanted(
        num_prompts=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        seed=args.seed,
    )
    from pagedattn.bench import offline
    from pagedattn.bench.profile import Profile

    profile = Profile() if args.profile else None
    batch = samples(wanted, engine.tokenizer)
    iterations = args.num_iters_warmup, args.num_iters
    with profile.attached(engine) if profile else nullcontext():
        result = offline.latency(
            engine,
            batch,
            *iterations,
            not args.disable_detokenize,
            not args.disable_tqdm,
        )
    print(f"Avg latency: {result['avg_latency']} seconds")
    for share, seconds in result["percentiles"].items():
        print(f"{share}% percentile latency: {seconds} seconds")
    _finish(args, result, [], profile)
    return 0


def _serve(args: argparse.Namespace) -> int:
    goals, percentiles, shown = _wanted_report(args)
    from pagedattn.bench import online, report

    base = args.base_url or f"http://{args.host}:{args.port}"
    headers = tuple(_header(pair) for pair in args.header)
    model = args.model or online.first_model(base, headers)
    extra = {n: getattr(args, n) for n in ("temperature", "top_p", "top_k")}
    extra = {n: v for n, v in extra.items() if v is not None}
    extra |= {"ignore_eos": True} if args.ignore_eos else {}
    target = online.Target(
        base, model, args.backend, args.endpoint, headers, tuple(extra.items())
    )
    load = online.Load(
        args.request_rate,
        args.burstiness,
        args.max_concurrency,
        args.ramp_up_strategy,
        args.ramp_up_start_rps,
        args.ramp_up_end_rps,
        args.seed,
    )
    tokenizer = _tokenizer(args.tokenizer)
    chosen = samples(_wanted(args), tokenizer)
    texts = [tokenizer.decode(sample.prompt) for sample in chosen]
    warm = args.num_warmups
    if warm:
        asyncio.run(online.run(target, chosen[:warm], texts[:warm], load, False))
    before = online.server_metrics(base, headers)
    timelines, seconds = asyncio.run(
        online.run(target, chosen, texts, load, not args.disable_tqdm)
    )
    result = summary(timelines, seconds, percentiles, goals)
    result |= online.cache_report(before, online.server_metrics(base, headers))
    print(report.table(result, "Serving Benchmark Result", shown))
    result |= {"model_id": model, "backend": args.backend, "num_prompts": len(chosen)}
    result |= {"request_rate": str(args.request_rate), "burstiness": args.burstiness}
    args.output_json = _result_file(args)
    _finish(args, result, timelines, None)
    return _say_failures(timelines)


def _ceilings(args: argparse.Namespace) -> int:
    from pagedattn.assembly import use_threads
    from pagedattn.bench.ceilings import measure

    use_threads(None)
    print(measure().lines())
    return 0


def _ladder(args: argparse.Namespace) -> int:
    from pagedattn.assembly import use_threads
    from pagedattn.bench import ladder
    from pagedattn.model import source

    use_threads(None)
    found, progress = source.resolve(args.model), not args.disable_tqdm
    rows = ladder.climb(found, args.num_prompts, args.prefix_len, progress)
    print(ladder.table(rows), ladder.timing(rows), sep="\n\n")
    if args.output_json:
        ladder.save_rows(rows, args.output_json)
    if args.plot:
        ladder.draw(rows, args.plot)
    return 0


def _add_compare(parser: argparse.ArgumentParser) -> None:
    engines = "pagedattn openvino vllm llama.cpp transformers".split()
    parser.add_argument("--engines", nargs="+", default=engines, help="or -1 by one")
    parser.add_argument("--works", nargs="+", default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--runs", type=int, default=2, help="of every engine, in turns")


def _compare(args: argparse.Namespace) -> int:
    from pagedattn.bench.compare import compare

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs ends with us
    print(compare(args.engines, args.works, args.runs))
    return 0


def _growth(args: argparse.Namespace) -> int:
    from pagedattn.bench.growth import table

    print(table())
    return 0


def _wanted_report(
    args: argparse.Namespace,
) -> tuple[dict[str, float], list[float], list[str]]:
    """(goals, percentiles, metrics to show), checked before any work."""
    shown = [name for name in args.percentile_metrics.split(",") if name]
    for name in shown:
        if name not in METRICS:
            raise UserError(
                f"percentile_metrics={name!r} is none of {SHOWN}.", "percentile_metrics"
            )
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= p <= 100 for p in percentiles):
        raise UserError(
            f"metric_percentiles={args.metric_percentiles!r} must be numbers from 0 to "
            "100, separated by commas.",
            "metric_percentiles",
        )
    return parse_goals(args.goodput), percentiles, shown


def _wanted(args: argparse.Namespace) -> Wanted:
    return Wanted(**{n: getattr(args, n) for n in Wanted.__dataclass_fields__})


def _engine(args: EngineArgs) -> Any:
    from pagedattn.assembly import assemble

    return assemble(args, show_progress=sys.stderr.isatty()).engine


def _tokenizer(name: str | None) -> Any:
    from pagedattn.assembly import load_tokenizer
    from pagedattn.model import source

    return load_tokenizer(source.resolve(name))


def _header(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise UserError(f"header={pair!r} must be NAME=VALUE.", "header")
    return name, value


def _result_file(args: argparse.Namespace) -> Path | None:
    if not (args.save_result or args.save_detailed):
        return None
    name = args.result_filename or f"{args.backend}-{args.request_rate}qps.json"
    return args.result_dir / name


def _finish(
    args: argparse.Namespace, result: dict[str, Any], timelines: Any, profile: Any
) -> None:
    """Write what was asked for: JSON, picture, trace."""
    from pagedattn.bench import report

    if args.output_json:
        details = {}
        if getattr(args, "save_detailed", False):
            details = {
                "ttfts": [t.values("ttft")[0] for t in timelines if t.ok],
                "itls": [t.values("itl") for t in timelines if t.ok],
                "input_lens": [t.prompt_tokens for t in timelines],
                "output_lens": [t.output_tokens for t in timelines],
                "errors": [t.error for t in timelines],
            }
        report.save({**report.machine(), **result, **details}, args.output_json)
    if getattr(args, "plot", None):
        report.draw(timelines, "requests over time", args.plot)
    if profile is not None:
        print(profile.table())
        profile.save(args.profile)


def _say_failures(timelines: Any) -> int:
    """1 and the first reason on stderr if any request failed."""
    failed = [t.error or "no end" for t in timelines if not t.ok]
    if failed:
        print(f"{len(failed)} requests failed; first: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0
