"""One engine's part of the comparison, in that engine's own interpreter.

    python -P peer.py ENGINE WORKS.json OPTIONS.json

Each engine stands in an environment of its own, so nothing of ours is imported here
unless it is ours that is measured. Prints one JSON line once a first token came, and
one for each work. Greedy, end-of-text ignored, `THREADS` threads, float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, Protocol

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
LONGEST = 2048  # tokens of a request
BATCH = 16  # rows of a static batch

Wanted = dict[str, Any]  # "prompt": token ids, "max_tokens": how many to generate


class Engine(Protocol):
    """What a peer must be able to do."""

    version: str

    def batch(self, requests: list[Wanted]) -> list[int]:
        """Serve all at once; how many tokens each got."""

    def stream(self, prompt: list[int], n: int) -> Iterator[object]:
        """Yield as each of `n` tokens comes."""


class VllmLike:
    """An engine with vLLM's Python surface: vLLM, and ours."""

    def __init__(self, llm: Any, params: Any, version: str) -> None:
        self.llm, self.params, self.version, self.streams = llm, params, version, 0

    def batch(self, requests: list[Wanted]) -> list[int]:
        """As `Engine`."""
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        params = [self._greedy(r["max_tokens"]) for r in requests]
        done = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in done]

    def stream(self, prompt: list[int], n: int) -> Iterator[object]:
        """As `Engine`."""
        engine, seen, self.streams = self.llm.llm_engine, 0, self.streams + 1
        request = {"prompt_token_ids": prompt}
        engine.add_request(f"stream{self.streams}", request, self._greedy(n))
        while engine.has_unfinished_requests():
            for output in engine.step():
                have = len(output.outputs[0].token_ids)
                yield from range(seen, have)
                seen = have

    def _greedy(self, n: int) -> Any:
        return self.params(temperature=0, max_tokens=n, ignore_eos=True)


def pagedattn(options: dict[str, str]) -> Engine:
    """This project's engine, as it comes."""
    import pagedattn

    llm = pagedattn.LLM(max_model_len=LONGEST)
    return VllmLike(llm, pagedattn.SamplingParams, pagedattn.__version__)


def vllm(options: dict[str, str]) -> Engine:
    """vLLM's build for CPUs."""
    import vllm

    llm = vllm.LLM(model=options["model"], dtype="float32", max_model_len=LONGEST)
    return VllmLike(llm, vllm.SamplingParams, vllm.__version__)


class Transformers:
    """Hugging Face's `generate`: static batches of requests of like output lengths."""

    def __init__(self, options: dict[str, str]) -> None:
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        self.torch, self.rows = torch, int(options.get("rows", BATCH))
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.model.generation_config.eos_token_id = None

    def batch(self, requests: list[Wanted]) -> list[int]:
        """As `Engine`: a batch runs until its longest has ended."""
        order = sorted(range(len(requests)), key=lambda i: requests[i]["max_tokens"])
        got = [0] * len(requests)
        for i in range(0, len(order), self.rows):
            some = [requests[j] for j in order[i : i + self.rows]]
            most = some[-1]["max_tokens"]
            made = self._generate([r["prompt"] for r in some], most)
            for j in order[i : i + self.rows]:
                got[j] = min(made, requests[j]["max_tokens"])
        return got

    def stream(self, prompt: list[int], n: int) -> Iterator[object]:
        """As `Engine`; the arrivals are noted first and told afterwards."""
        arrivals: list[float] = []

        class Clock:
            """A streamer that notes when it is called."""

            def put(self, value: Any) -> None:
                """Called with the prompt, then with each token."""
                arrivals.append(time.perf_counter())

            def end(self) -> None:
                """Called at the end."""

        self._generate([prompt], n, Clock())
        yield from arrivals[1:]

    def _generate(self, prompts: list[list[int]], n: int, streamer: Any = None) -> int:
        """Generate `n` tokens for each prompt; how many it made."""
        torch, width = self.torch, max(map(len, prompts))
        padded = [[0] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        with torch.inference_mode():
            made = self.model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
        return made.shape[1] - width


class OpenVino:
    """OpenVINO GenAI's continuous batching, with its prefix cache."""

    def __init__(self, options: dict[str, str]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.version, self.sent = openvino_genai.__version__, 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 512, 64
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        scheduler.cache_size = 4  # GB
        config = {
            "INFERENCE_NUM_THREADS": THREADS,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": "f32",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["openvino"], scheduler, "CPU", config
        )

    def batch(self, requests: list[Wanted]) -> list[int]:
        """As `Engine`."""
        handles = [self._add(r["prompt"], r["max_tokens"]) for r in requests]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    def stream(self, prompt: list[int], n: int) -> Iterator[object]:
        """As `Engine`."""
        handle = self._add(prompt, n)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    yield from output.generated_ids

    def _add(self, prompt: list[int], n: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
        ids = self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
        self.sent += 1
        return self.pipeline.add_request(self.sent, ids, config)


class LlamaCpp:
    """llama.cpp through its Python binding: one request at a time."""

    def __init__(self, options: dict[str, str]) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
        self.model = llama_cpp.Llama(
            options["gguf"], n_ctx=LONGEST, n_batch=512, verbose=False, **threads
        )

    def batch(self, requests: list[Wanted]) -> list[int]:
        """As `Engine`."""
        streams = (self.stream(r["prompt"], r["max_tokens"]) for r in requests)
        return [sum(1 for _ in stream) for stream in streams]

    def stream(self, prompt: list[int], n: int) -> Iterator[object]:
        """As `Engine`."""
        tokens = self.model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        return islice(tokens, n)


ENGINES = {
    "pagedattn": pagedattn,
    "vllm": vllm,
    "transformers": Transformers,
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
}


# The works.
def many(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """W1: every request at once, after a small batch that is not counted."""
    engine.batch(work["warmup"])
    return {"seconds": _seconds(engine, work["requests"])}


def one(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """W2: one request alone, the best of several."""
    _first_and_rate(engine, work["warmup"])
    found = [_first_and_rate(engine, request) for request in work["requests"]]
    firsts, rates = zip(*found, strict=True)
    return {"first_ms": min(firsts), "tokens_per_s": max(rates)}


def shared(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """W3: a long prefix seen for the first and for the second time, then by many."""
    engine.batch(work["warmup"])
    cold, _ = _first_and_rate(engine, work["cold"])
    warm, _ = _first_and_rate(engine, work["warm"])
    seconds = _seconds(engine, work["requests"])
    return {"seconds": seconds, "cold_ms": cold, "warm_ms": warm}


WORKS = {"W1": many, "W2": one, "W3": shared}


def _seconds(engine: Engine, requests: list[Wanted]) -> float:
    start = time.perf_counter()
    got = engine.batch(requests)
    seconds = time.perf_counter() - start
    assert got == [r["max_tokens"] for r in requests], "not as many tokens as asked"
    return seconds


def _first_and_rate(engine: Engine, request: Wanted) -> tuple[float, float]:
    """Milliseconds to the first token, tokens a second after it."""
    start, n = time.perf_counter(), request["max_tokens"]
    arrivals = [start]
    for told in engine.stream(request["prompt"], n):
        # A peer that can only tell afterwards tells the time.
        arrivals.append(told if isinstance(told, float) else time.perf_counter())
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert len(gaps) == n, "not as many tokens as asked"
    return 1e3 * gaps[0], (n - 1) / sum(gaps[1:])


def main(name: str, works_file: str, options_file: str) -> None:
    """Load the engine, say when it answers, do the works."""
    with open(works_file, encoding="utf-8") as file:
        works = json.load(file)
    with open(options_file, encoding="utf-8") as file:
        engine = ENGINES[name](json.load(file))
    for _ in engine.stream(works.pop("first"), 1):
        pass
    _say({"version": engine.version})
    for work, given in works.items():
        _say({work: WORKS[work](engine, given)})


def _say(found: dict[str, Any]) -> None:
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
