"""What a benchmark sends: prompts and how many tokens each answer shall have.

Made up (random ids, prefixes that repeat) or read from a file (ShareGPT's format, one
JSON object a line). Knows tokens and numbers; knows nothing of engines or clocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pagedattn.errors import UserError

DATASETS = ("random", "sharegpt", "prefix_repetition", "custom")
LONGEST_PROMPT, LONGEST_WHOLE = 1024, 2048  # of ShareGPT's conversations, as vLLM's


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its prompt as token ids, and the tokens to answer with."""

    prompt: tuple[int, ...]
    output_len: int


class Encoder(Protocol):
    """What a dataset asks of a tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests to make; fields are vLLM's flags of the same names."""

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    seed: int = 0


def samples(wanted: Wanted, tokenizer: Encoder) -> list[Sample]:
    """The requests of a dataset, the same for the same `wanted`.

    Raises UserError naming the flag that does not fit.
    """
    if wanted.num_prompts < 1:
        raise UserError(
            f"num_prompts={wanted.num_prompts} must be at least 1.", "num_prompts"
        )
    _refuse_unused(wanted)
    draw = random.Random(wanted.seed)
    match wanted.dataset_name:
        case "random":
            made = _random(wanted, _plain_ids(tokenizer), draw)
        case "prefix_repetition":
            made = _prefixes(wanted, _plain_ids(tokenizer), draw)
        case "sharegpt":
            made = _sharegpt(wanted, tokenizer, draw)
        case "custom":
            made = _custom(wanted, tokenizer)
        case other:
            raise UserError(
                f"dataset_name={other!r} is none of {', '.join(DATASETS)}.",
                "dataset_name",
            )
    return list(made)


def _refuse_unused(wanted: Wanted) -> None:
    """Lengths that the dataset has of its own can't be given as well."""
    unused = []
    if wanted.dataset_name != "random":
        unused = ["input_len", "random_range_ratio", "random_prefix_len"]
    if wanted.dataset_name == "prefix_repetition":
        unused.append("output_len")
    if wanted.dataset_name in ("random", "prefix_repetition"):
        unused.append("dataset_path")
    for name in unused:
        if getattr(wanted, name):
            raise UserError(
                f"{name}={getattr(wanted, name)} means nothing to the dataset "
                f"{wanted.dataset_name!r}.",
                name,
            )


def _plain_ids(tokenizer: Encoder) -> list[int]:
    """Ids that mean text: a special token in a random prompt would end or bend it."""
    return [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]


def _length(mean: int, ratio: float, draw: random.Random) -> int:
    """A length within `ratio` of `mean`, at least 1."""
    return max(1, draw.randint(int(mean * (1 - ratio)), int(mean * (1 + ratio))))


def _random(
    wanted: Wanted, ids: Sequence[int], draw: random.Random
) -> Iterator[Sample]:
    if not 0 <= wanted.random_range_ratio < 1:
        raise UserError(
            f"random_range_ratio={wanted.random_range_ratio} must be in [0, 1).",
            "random_range_ratio",
        )
    prefix = draw.choices(ids, k=wanted.random_prefix_len)
    input_len = 1024 if wanted.input_len is None else wanted.input_len
    output_len = 128 if wanted.output_len is None else wanted.output_len
    for _ in range(wanted.num_prompts):
        own = _length(input_len, wanted.random_range_ratio, draw)
        answer = _length(output_len, wanted.random_range_ratio, draw)
        yield Sample((*prefix, *draw.choices(ids, k=own)), answer)


def _prefixes(
    wanted: Wanted, ids: Sequence[int], draw: random.Random
) -> Iterator[Sample]:
    """Every prefix serves the same number of requests, in a shuffled order."""
    count = wanted.prefix_repetition_num_prefixes
    if not 1 <= count <= wanted.num_prompts:
        raise UserError(
            f"prefix_repetition_num_prefixes={count} must be between 1 and "
            f"num_prompts={wanted.num_prompts}.",
            "prefix_repetition_num_prefixes",
        )
    length = wanted.prefix_repetition_prefix_len
    heads = [draw.choices(ids, k=length) for _ in range(count)]
    order = [heads[i % count] for i in range(wanted.num_prompts)]
    draw.shuffle(order)
    for head in order:
        tail = draw.choices(ids, k=wanted.prefix_repetition_suffix_len)
        yield Sample((*head, *tail), wanted.prefix_repetition_output_len)


def _sharegpt(
    wanted: Wanted, tokenizer: Encoder, draw: random.Random
) -> Iterator[Sample]:
    """First turns of conversations, too short and too long ones left out as vLLM's."""
    turns = [
        [turn["value"] for turn in entry["conversations"][:2]]
        for entry in _read(wanted, whole=True)
        if len(entry.get("conversations", ())) >= 2
    ]
    draw.shuffle(turns)
    found = 0
    for question, answer in turns:
        prompt = tokenizer.encode(question)
        output = wanted.output_len or len(tokenizer.encode(answer, False))
        if min(len(prompt), output) < 4 or len(prompt) > LONGEST_PROMPT:
            continue
        if len(prompt) + output > LONGEST_WHOLE:
            continue
        yield Sample(tuple(prompt), output)
        found += 1
        if found == wanted.num_prompts:
            return
    if not found:
        raise UserError(
            f"{wanted.dataset_path} has no conversation of a usable length.",
            "dataset_path",
        )


def _custom(wanted: Wanted, tokenizer: Encoder) -> Iterator[Sample]:
    """{"prompt": …, "output_tokens": …} a line, in the file's order."""
    for entry in _read(wanted, whole=False)[: wanted.num_prompts]:
        output = wanted.output_len or entry.get("output_tokens") or 256
        yield Sample(tuple(tokenizer.encode(entry["prompt"])), int(output))


def _read(wanted: Wanted, whole: bool) -> list[dict[str, Any]]:
    """The objects of a JSON file, or of one with an object a line."""
    path = wanted.dataset_path
    if path is None:
        raise UserError(
            f"dataset_name={wanted.dataset_name!r} needs dataset_path.", "dataset_path"
        )
    try:
        text = Path(path).read_text("utf-8")
        found = json.loads(text) if whole else list(map(json.loads, text.splitlines()))
        if not isinstance(found, list) or not all(isinstance(e, dict) for e in found):
            raise ValueError("it is no list of objects")
        if not whole and not all(isinstance(e.get("prompt"), str) for e in found):
            raise ValueError('a line has no "prompt"')
    except (OSError, ValueError) as error:
        raise UserError(f"dataset_path={path}: {error}", "dataset_path") from error
    return found
