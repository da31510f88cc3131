"""What a caller asks for, one request's progress, and what the caller gets back.

Knows nothing of blocks, tensors or text. `SamplingParams` is the caller's wish,
`Request` is the scheduler's view of one sequence, `RequestOutput` is the answer.
Built in chapters 05 (requests) and 08 (sampling parameters).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any

from pagedattn.errors import NotSupported, UserError

MAX_N = 16_384  # sequences for one prompt
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 128
LONGEST_STRING = 4_096  # characters of a stop string or a bad word
MAX_LOGIT_BIAS = 4_096
MAX_CHOICES = 1_024
GREEDY_BELOW = 1e-5  # temperatures under this are greedy
LOWEST_TEMPERATURE = 1e-2  # positive temperatures under this are raised to it
INT64 = 2**63


class RequestOutputKind(Enum):
    """What each output holds: everything so far, only what is new, or one final."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Checks: each says `not (low <= x <= high)`, so that NaN fails as well.
def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{name} must be a number, got {value!r}.", name)
    if not (low <= value <= high) or math.isinf(value):
        raise UserError(f"{name} must be in [{low:g}, {high:g}], got {value}.", name)
    return float(value)


def _whole(name: str, value: Any, low: int, high: int = INT64 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} must be a whole number, got {value!r}.", name)
    if not low <= value <= high:
        top = f" and at most {high}" if high < INT64 - 1 else ""
        raise UserError(f"{name} must be at least {low}{top}, got {value}.", name)
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, got {value!r}.", name)
    return value


def _items(name: str, value: Any, most: int) -> list[Any]:
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise UserError(f"{name} must be a list, got {value!r}.", name)
    items = list(value)
    if len(items) > most:
        raise UserError(
            f"{name} holds {len(items)} entries; the limit is {most}.", name
        )
    return items


def _strings(name: str, value: Any, most: int) -> list[str]:
    items = [value] if isinstance(value, str) else _items(name, value or [], most)
    for item in items:
        if not isinstance(item, str) or not item:
            raise UserError(f"{name} must hold non-empty strings, got {item!r}.", name)
        if len(item) > LONGEST_STRING:
            raise UserError(
                f"{name} holds a string of {len(item)} characters; the limit is "
                f"{LONGEST_STRING}.",
                name,
            )
    return items


def _ids(name: str, value: Any) -> list[int]:
    return list(dict.fromkeys(_whole(name, i, 0) for i in _items(name, value, 2**20)))


def _top(name: str, value: Any) -> int | None:
    """How many log-probabilities: None, 0 or more, or -1 for the whole vocabulary."""
    if value is None or value is False:
        return None
    return 1 if value is True else _whole(name, value, -1)


GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(slots=True)
class StructuredOutputsParams:
    """What an answer's text must be; exactly one kind, names and meanings vLLM's.

    `json`: a JSON schema, as a dict or as text; `regex`: an expression that all of the
    answer matches; `choice`: one of these strings; `grammar`: a grammar in Lark's
    notation or in EBNF; `json_object`: any JSON object. JSON may hold white space
    between its parts: none with `disable_any_whitespace`, or what the expression
    `whitespace_pattern` matches. With `disable_additional_properties` an object has
    no properties but those that its schema lists. `source` is what errors call the
    field. Whether a grammar can be compiled is known to `sampling.grammar`, which
    `Intake` asks.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    source: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [k for k in GRAMMAR_KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise self.fault(
                f"must have exactly one of {', '.join(GRAMMAR_KINDS)}, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.choice is not None:
            self.choice = _strings(self.source, self.choice, MAX_CHOICES)
            if not self.choice:
                raise self.fault("has an empty choice")
        self._check_texts()
        if self.json_object is not None and self.json_object is not True:
            raise self.fault(f"json_object must be true, got {self.json_object!r}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise self.fault(f"{name} must be true or false")

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str) or not text:
                raise self.fault(f"{name} must be a string that is not empty")
            if "\0" in text:
                raise self.fault(f"{name} holds a NUL character")
        if not isinstance(self.json, str | dict | bool | None):
            raise self.fault(
                f"json must be a schema or its text, got {type(self.json).__name__}"
            )
        if isinstance(self.json, str) and not self.json.strip():
            raise self.fault("has a json that is blank")

    @property
    def kind(self) -> str:
        """Which of the five was asked for."""
        return next(k for k in GRAMMAR_KINDS if getattr(self, k) is not None)

    def fault(self, what: str) -> UserError:
        """The error that says what is wrong, under the name that the caller used."""
        return UserError(f"{self.source} {what}.", self.source)


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; names, defaults and meanings are vLLM's.

    A bad value raises `UserError` naming the field, the value and the limit. Limits
    that depend on the model (vocabulary, `max_logprobs`) are checked by
    `check_model`. Log-probabilities are those of the raw logits, before penalties
    and filters, as vLLM's default reports them.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_lists()
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise UserError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.",
                "output_kind",
            )
        wish = self.structured_outputs
        if wish is not None and not isinstance(wish, StructuredOutputsParams):
            raise UserError(
                "structured_outputs must be StructuredOutputsParams, got "
                f"{type(wish).__name__}.",
                "structured_outputs",
            )
        if self.stop and not self.detokenize:
            raise UserError("stop strings need detokenize=True.", "stop")

    def _check_numbers(self) -> None:
        self.n = _whole("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _real(name, getattr(self, name), -2, 2))
        self.repetition_penalty = _real(
            "repetition_penalty", self.repetition_penalty, 1e-6, 1e6
        )
        self.temperature = _real("temperature", self.temperature, 0, 2)
        self.top_p = _real("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise UserError("top_p must be in (0, 1], got 0.", "top_p")
        self.top_k = max(_whole("top_k", self.top_k, -1), 0)
        self.min_p = _real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            seed = _whole("seed", self.seed, -INT64)
            self.seed = None if seed == -1 else seed
        self._settle_temperature()

    def _settle_temperature(self) -> None:
        if self.temperature < GREEDY_BELOW:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
            if self.n > 1:
                raise UserError(f"n must be 1 when greedy, got {self.n}.", "n")
        else:
            self.temperature = max(self.temperature, LOWEST_TEMPERATURE)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = _whole("max_tokens", self.max_tokens, 1)
        self.min_tokens = _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, "
                f"got {self.min_tokens}.",
                "min_tokens",
            )
        self.logprobs = _top("logprobs", self.logprobs)
        self.prompt_logprobs = _top("prompt_logprobs", self.prompt_logprobs)
        if self.truncate_prompt_tokens is not None:
            keep = _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if keep == 0:
                raise UserError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0.",
                    "truncate_prompt_tokens",
                )

    def _check_lists(self) -> None:
        self.stop = _strings("stop", self.stop, MAX_STOP_STRINGS)
        self.bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids or [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise UserError("allowed_token_ids is empty.", "allowed_token_ids")
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no draw."""
        return self.temperature == 0.0

    def check_model(self, vocab_size: int, max_logprobs: int) -> None:
        """Refuse ids outside the vocabulary and more log-probabilities than allowed."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for i in getattr(self, name) or ():
                if i >= vocab_size:
                    raise UserError(
                        f"{name} holds token id {i}; the vocabulary has {vocab_size}.",
                        name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            want = getattr(self, name)
            count = vocab_size if want == -1 else want or 0
            limit = vocab_size if max_logprobs == -1 else max_logprobs
            if count > limit:
                raise UserError(
                    f"{name} asks for {count}; --max-logprobs allows {limit}.", name
                )


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _bias(value: Any) -> dict[int, float]:
    """Token id -> bias; keys may be digits (JSON), values are clipped to ±100."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise UserError(
            f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers.",
            "logit_bias",
        )
    bias = {}
    for key, amount in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            key = int(key[:20])
        token = _whole("logit_bias", key, 0)
        bias[token] = min(max(_real("logit_bias", amount, -1e9, 1e9), -100.0), 100.0)
    return bias


def params_from(values: dict[str, Any]) -> SamplingParams:
    """`SamplingParams` from a plain dict; an unknown name is an error."""
    known = {f.name for f in fields(SamplingParams)}
    for name in values:
        if name not in known:
            raise NotSupported(f"{name} is not a sampling parameter.", name)
    wish = values.get("structured_outputs")
    if isinstance(wish, dict):
        values = {**values, "structured_outputs": grammar_from(wish)}
    return SamplingParams(**values)


def grammar_from(
    values: dict[str, Any], source: str = "structured_outputs"
) -> StructuredOutputsParams:
    """`StructuredOutputsParams` from a plain dict; an unknown name is an error."""
    known = {f.name for f in fields(StructuredOutputsParams)} - {"source"}
    for name in values:
        if name not in known:
            raise NotSupported(f"{source}: {name!r} is not supported.", source)
    given = {name: value for name, value in values.items() if value is not None}
    return StructuredOutputsParams(**given, source=source)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way: `computed` catches up with `num_tokens`.

    `tokens` are prompt and output with known ids; `pending` counts sampled tokens of
    plans still in flight. `limit` is the greatest `num_tokens` may grow to. Only the
    scheduler changes a request.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    limit: int
    seed: int = 0
    sibling: int = 0
    priority: int = 0
    arrival: int = 0
    eos_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    extra_keys: tuple[tuple[str, str], ...] = ()
    first_block_keys: tuple[tuple[str, str], ...] = ()
    pooling: str | None = None  # nothing is generated: its hidden states are wanted
    prompt_len: int = field(init=False)
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks
    computed: int = 0
    pending: int = 0
    epoch: int = 0  # new at each start, so that stale results are recognised
    passed: int = 0  # admissions, while it waits, of requests that came later
    cached: int | None = None  # prompt tokens found in the cache at first admission
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those that plans in flight will sample."""
        return len(self.tokens) + self.pending

    @property
    def behind(self) -> int:
        """Tokens to compute before the next can be sampled; 0 at the limit."""
        return 0 if self.num_tokens >= self.limit else self.num_tokens - self.computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far and known."""
        return len(self.tokens) - self.prompt_len

    @property
    def reads_cache(self) -> bool:
        """Whether hits may stand for its tokens: prompt log-probabilities need every
        position's logits, most pooling its hidden states."""
        return self.params.prompt_logprobs is None and self.pooling in (None, "LAST")

    def ending(self) -> tuple[str, int | None] | None:
        """(finish reason, stop reason) if the last known token ends the request.

        In order: fewer than `min_tokens` never stop; end-of-text (stop reason None);
        `stop_token_ids` (the id); the length limit.
        """
        last, params = self.tokens[-1], self.params
        if self.num_output >= params.min_tokens:
            if last in self.eos_ids and not params.ignore_eos:
                return "stop", None
            if last in params.stop_token_ids:
                return "stop", last
        return ("length", None) if len(self.tokens) >= self.limit else None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, its rank (1 = most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of an answer; token ids, text and logprobs are cut at the stop."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimes:
    """Clock readings of one request, in seconds of the engine's clock."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one request: its prompt and `n` completions, in sibling order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestTimes | None = None
    pooled: Any = None  # where hidden states were wanted, and nothing generated
