"""Every engine setting, once: its name, its default and its meaning.

`EngineArgs` is what a caller gives; the command line, Python keyword arguments and
the book's table are made from its fields. `EngineConfig` is what the engine runs
with: frozen, every "auto" settled. Knows nothing of models beyond the few numbers
handed to `settle`. Built in chapter 09.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from pagedattn.errors import NotSupported, UserError

CPU_KV_SHARE = 0.4  # of the free memory, where no size is given
LARGEST_AUTO_KV = 8 << 30  # bytes; more must be asked for
WHOLE_PROMPTS = 512  # tokens of a step without chunks, where no budget is given


def setting(
    default: Any, help: str, *, flag: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """A dataclass field that carries its command-line help, short flag and choices."""
    return field(
        default=default, metadata={"help": help, "flag": flag, "choices": choices}
    )


@dataclass(slots=True)
class EngineArgs:
    """What a caller may set; None means "auto", settled when the model is known."""

    model: str | None = setting(
        None, "folder, hub id or .gguf file; nothing: the demo model SmolLM2-135M"
    )
    tokenizer: str | None = setting(
        None, "folder, hub id or .gguf file of another tokenizer"
    )
    revision: str | None = setting(None, "revision of a hub model")
    served_model_name: list[str] | None = setting(
        None, "public names of the model; the first is used in answers and metrics"
    )
    dtype: str = setting(
        "auto",
        "what is computed in: float32 on a CPU, whatever the file holds; on a GPU auto "
        "is the file's own, bfloat16 where that is no 16-bit float",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    device: str = setting(
        "auto",
        "where to compute: auto is cuda where torch finds a card and Triton is "
        "installed, else cpu",
        choices=("auto", "cpu", "cuda"),
    )
    quantization: str | None = setting(
        None, "no quantised execution is built yet: leave it out", flag="-q"
    )
    runner: str = setting(
        "auto",
        "pooling: embeddings and scores only; generate: text, and of a causal model "
        "embeddings too; auto: pooling for an encoder, else generate",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto",
        "whether a causal model also gives embeddings: auto and embed: yes; none: no",
        choices=("auto", "none", "embed"),
    )
    pooler_config: dict[str, Any] | None = setting(
        None,
        "JSON object over the model's own pooling: pooling_type (LAST, MEAN, CLS), "
        "use_activation (true: embeddings of length 1), is_matryoshka or "
        "matryoshka_dimensions (shorter embeddings may be asked for)",
    )
    seed: int = setting(0, "seed of requests that bring none")
    max_model_len: int | None = setting(
        None,
        "longest prompt + output in tokens, 4096 or 4k; nothing or -1: as long as "
        "model and KV pool allow",
    )
    block_size: int = setting(16, "tokens in one KV block")
    enable_prefix_caching: bool = setting(True, "reuse KV blocks of common prefixes")
    gpu_memory_utilization: float | None = setting(
        None,
        "share of the free memory that the KV pool may take; nothing: on a CPU "
        f"{CPU_KV_SHARE}, at most {LARGEST_AUTO_KV >> 30} GiB. On a GPU the share of "
        "the card's memory that everything may take; nothing: 0.9",
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "bytes of the KV pool, 2147483648 or 2g; nothing: a share of the memory"
    )
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV blocks, whatever the memory (for tests)"
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "token budget of one step; nothing: as many as this machine needs to compute "
        "at nearly its full rate, measured at start, and at least max_num_seqs",
    )
    max_num_seqs: int = setting(128, "most sequences running at once")
    enable_chunked_prefill: bool = setting(
        True, "split long prompts over steps so that others go on"
    )
    long_prefill_token_threshold: int = setting(
        0, "most tokens of one prompt in one step; 0: the budget"
    )
    scheduling_policy: str = setting(
        "fcfs",
        "order of waiting requests; priority: smaller numbers first; lpm: of the first "
        "16 the longest cached prefix, nobody passed by more than 32 that came later",
        choices=("fcfs", "priority", "lpm"),
    )
    max_logprobs: int = setting(20, "most log-probabilities a request may ask; -1: all")
    generation_config: str = setting(
        "auto",
        "sampling defaults: auto (the model's generation_config) or vllm (neutral)",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] | None = setting(
        None, "JSON object of further sampling defaults"
    )
    num_threads: int | None = setting(
        None, "threads of one step; nothing: the physical cores"
    )
    pin_threads: bool = setting(
        False, "bind each of these threads to a physical core of its own (Linux)"
    )
    enforce_eager: bool = setting(False, "on a GPU, record no CUDA graphs")
    cudagraph_mode: str = setting(
        "FULL_DECODE_ONLY",
        "which steps are CUDA graphs: NONE; FULL_DECODE_ONLY: steps of single tokens; "
        "PIECEWISE: all, but for attention; FULL_AND_PIECEWISE: the former whole, the "
        "others but for attention; FULL: all, whole",
    )
    cudagraph_capture_sizes: list[int] | None = setting(
        None, "numbers of sequences to record; nothing: 1, 2, 4, every 8th, every 16th"
    )
    max_cudagraph_capture_size: int | None = setting(
        None, "most sequences in a CUDA graph; nothing: max_num_seqs, at most 512"
    )
    disable_cascade_attn: bool = setting(
        True,
        "on a GPU, read a prefix that all requests share once for each of them; if "
        "false, once for all, from 8 requests and 256 tokens",
    )
    async_scheduling: bool | None = setting(
        None, "on a GPU, plan the next step while one runs; nothing: yes"
    )
    optimization_level: int = setting(
        0,
        "0: kernels as they are; torch.compile, levels 1 to 3, is not built",
        flag="-O",
    )
    disable_log_stats: bool = setting(False, "no line of statistics every 10 s")

    def __post_init__(self) -> None:
        self.max_model_len = parse_size("max_model_len", self.max_model_len)
        if self.max_model_len == -1:
            self.max_model_len = None
        self.kv_cache_memory_bytes = parse_size(
            "kv_cache_memory_bytes", self.kv_cache_memory_bytes
        )
        if isinstance(self.served_model_name, str):
            self.served_model_name = [self.served_model_name]
        if self.served_model_name is not None and not all(
            self.served_model_name or [""]
        ):
            raise UserError("served_model_name must not be empty.", "served_model_name")
        if self.quantization is not None:
            raise NotSupported(
                f"quantization={self.quantization!r} is not built yet; GGUF files of "
                "any supported type run in float32.",
                "quantization",
            )
        if self.optimization_level:
            raise NotSupported(
                f"optimization_level={self.optimization_level} is not built: "
                "torch.compile has nothing to fuse between these kernels; CUDA graphs "
                "are cudagraph_mode's. It must be 0.",
                "optimization_level",
            )
        self._check_choices()
        self._check_ranges()

    def _check_choices(self) -> None:
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices:
                raise UserError(
                    f"{f.name} must be one of {', '.join(choices)}, got {value!r}.",
                    f.name,
                )

    def _check_ranges(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "bool" and not isinstance(value, bool):
                raise UserError(
                    f"{f.name} must be true or false, got {value!r}.", f.name
                )
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            kinds = int | float if name == "gpu_memory_utilization" else int
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise UserError(
                    f"{name} must be a number{' without a fraction' * (kinds is int)}, "
                    f"got {value!r}.",
                    name,
                )
            if not low <= value <= high:
                raise UserError(
                    f"{name} must be in [{low:g}, {high:g}], got {value}.", name
                )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise UserError(
                "long_prefill_token_threshold needs enable_chunked_prefill.",
                "long_prefill_token_threshold",
            )

    def settle(
        self,
        model_len: int,
        block_bytes: int,
        free_bytes: int,
        groups: int = 1,
        knee: int = WHOLE_PROMPTS,
    ) -> EngineConfig:
        """Settle what is "auto", given the model's length, the bytes of one block, the
        number of layer groups, and the tokens from which a step runs at full rate.

        The number of blocks includes the null block. Whether `max_model_len` fits
        the pool depends on the layer groups and is settled by `fit_length`.
        """
        if self.max_model_len is not None and self.max_model_len > model_len:
            raise UserError(
                f"max_model_len={self.max_model_len} is more than the "
                f"{model_len} tokens this model was made for.",
                "max_model_len",
            )
        budget = self._budget(knee)
        length = self._length(model_len, budget)
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self._num_blocks(length * groups, block_bytes, free_bytes),
            max_model_len=length,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=self.enable_prefix_caching,
            chunked_prefill=self.enable_chunked_prefill,
            long_prefill=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
        )

    def _budget(self, knee: int) -> int:
        """Tokens of a step. More than the knee would compute no faster, and every
        stream would wait for them."""
        # 16 streams on two cores: 99 % of the gaps under 280 ms with 128 tokens a step,
        # under 620 ms with 512, at the same throughput.
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if not self.enable_chunked_prefill:
            return max(WHOLE_PROMPTS, self.max_num_seqs)
        return max(knee, self.max_num_seqs)

    def _length(self, model_len: int, budget: int) -> int:
        """The context length; without chunks every prompt must fit into one step, and
        so must prompt and output together, when a preempted request resumes."""
        if self.enable_chunked_prefill or (self.max_model_len or model_len) <= budget:
            return self.max_model_len or model_len
        if self.max_model_len is None:
            return budget
        raise UserError(
            f"max_model_len={self.max_model_len} needs chunked prefill, or "
            f"max_num_batched_tokens of as much; it is {budget}.",
            "max_num_batched_tokens",
        )

    def _num_blocks(self, longest: int, block_bytes: int, free_bytes: int) -> int:
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override
        size = self.kv_cache_memory_bytes
        if size is None:
            size = int(free_bytes * (self.gpu_memory_utilization or CPU_KV_SHARE))
            if self.gpu_memory_utilization is None:
                # Small models: no more than every sequence at full length could use.
                useful = self.max_num_seqs * (longest + self.block_size)
                useful = useful // self.block_size * block_bytes
                size = min(size, LARGEST_AUTO_KV, max(useful, 2 * block_bytes))
        blocks = size // block_bytes
        if blocks < 2:
            raise UserError(
                f"kv_cache_memory_bytes={size} holds {blocks} KV blocks of "
                f"{block_bytes} bytes; at least 2 are needed.",
                "kv_cache_memory_bytes",
            )
        return blocks


_RANGES = (
    ("seed", -(2**63), 2**63 - 1),
    ("max_model_len", 1, 2**31 - 1),
    ("block_size", 1, 256),
    ("gpu_memory_utilization", 0.01, 1.0),
    ("kv_cache_memory_bytes", 1, 2**50),
    ("num_gpu_blocks_override", 2, 2**31 - 1),
    ("max_num_batched_tokens", 1, 2**20),
    ("max_num_seqs", 1, 65_536),
    ("long_prefill_token_threshold", 0, 2**20),
    ("max_logprobs", -1, 2**31 - 1),
    ("num_threads", 1, 1024),
    ("max_cudagraph_capture_size", 1, 65_536),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine runs with. Sizes in tokens; `num_blocks` with the null block."""

    block_size: int = 16
    num_blocks: int = 64
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    prefix_caching: bool = True
    chunked_prefill: bool = True
    long_prefill: int = 0
    policy: str = "fcfs"
    seed: int = 0
    max_logprobs: int = 20


def parse_size(name: str, value: Any) -> int | None:
    """A whole number, or one with k, m or g (×1000 each) or K, M, G (×1024 each)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", str(value).strip())
    if match is None:
        raise UserError(
            f"{name} must be a size such as 4096 or 4k, got {value!r}.", name
        )
    number, letter = match.groups()
    power = "kmg".index(letter.lower()) + 1 if letter else 0
    size = float(number) * (1024 if letter.isupper() else 1000) ** power
    if size != int(size):
        raise UserError(f"{name} must be a whole number, got {value!r}.", name)
    return int(size)


# The command line, made from the fields above.
def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting; booleans also get their --no- form."""
    for f in fields(EngineArgs):
        names = ["--" + f.name.replace("_", "-")]
        if f.metadata["flag"]:
            names.append(f.metadata["flag"])
        parser.add_argument(*names, **_flag_options(f))


def _flag_options(f: Field[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "default": f.default,
        "help": f"{f.metadata['help']} (default: {f.default})",
        "dest": f.name,
    }
    options["help"] = options["help"].replace("%", "%%")
    if f.metadata["choices"]:
        options["choices"] = f.metadata["choices"]
    kind = str(f.type)
    if kind.startswith("bool"):
        options["action"] = argparse.BooleanOptionalAction
    elif kind.startswith("list"):
        options["nargs"] = "+"
        options["type"] = int if kind.startswith("list[int") else str
    elif kind.startswith("dict"):
        options["type"] = json.loads
    elif f.name in ("max_model_len", "kv_cache_memory_bytes"):
        options["type"] = str
    elif kind.startswith(("int", "float")):
        options["type"] = int if kind.startswith("int") else float
    return options


def args_from(namespace: argparse.Namespace) -> EngineArgs:
    """The `EngineArgs` of a parsed command line; other names in it are left alone."""
    return EngineArgs(
        **{
            f.name: getattr(namespace, f.name)
            for f in fields(EngineArgs)
            if hasattr(namespace, f.name)
        }
    )


def settings_table() -> list[tuple[str, Any, str]]:
    """(flag, default, meaning) for each setting, for the book and the README."""
    return [
        (
            "--" + f.name.replace("_", "-"),
            None if f.default is MISSING else f.default,
            f.metadata["help"],
        )
        for f in fields(EngineArgs)
    ]
