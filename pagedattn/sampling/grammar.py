"""Which tokens a grammar allows next: compiled once, masked at every step.

Knows JSON schemas, regular expressions and grammars, one vocabulary's bytes, and the
library that does the parsing; nothing of logits' meaning or of who asks. `Grammars`
compiles, bounded in size, depth and work, and remembers; a `Matcher` follows one
sequence. Built, in small, in chapter 10.

The parser is llguidance (Rust, an Earley parser over a lexer of lazy derivatives). It
was chosen over xgrammar by trying both on one core at the demo's 49,152 tokens
(llguidance 1.9.1 / xgrammar 0.2.9): import 10 / 1,600 ms (xgrammar wants torch, triton
and transformers; llguidance has no dependency), vocabulary 135 / 50 ms, a person's
schema 0.9 / 6 ms to compile, 100 nested objects 13 / 1,070 ms, an e-mail's expression
1 / 46 ms; a mask 7 / 9 µs in JSON, 87 / 11 µs (mean 84 / 178) in the e-mail.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from pagedattn.errors import NotSupported
from pagedattn.request import SamplingParams, StructuredOutputsParams

CACHED = 128  # compiled grammars kept, least recently used out first; 1 to 100 KB each
MAX_SIZE = 131_072  # characters of a schema, an expression or a grammar
MAX_DEPTH = 100  # nesting of a schema's lists and objects
MAX_DIGITS = 64  # in a row in JSON; else a number need never end
WHITE_SPACE = r"[ \n\r\t]{1,64}"  # in a row between JSON's parts, for the same reason
LONGEST_FAULT = 400  # characters of the library's message that are passed on

# Masks hold every token that the grammar can go on with. Without this, text that is
# certain to come would be allowed in one spelling only.
HEADER = '%llguidance {"no_forcing": true}\n'


class Matcher:
    """Follows one sequence through its grammar.

    `block` masks the next row, `advance` takes note of a token that was chosen. Fed
    the same tokens it is in the same state, whatever was masked in between.
    """

    def __init__(self, machine: Any, words: _Words, params: SamplingParams) -> None:
        self._machine = machine
        self._words = words
        wish = params.structured_outputs
        self._is_json = wish is not None and wish.kind in ("json", "json_object")
        ends = {i for i in params.stop_token_ids or () if i in words.special}
        ends |= set() if params.ignore_eos else words.eos
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._never = words.eos | ends  # no text: the parser hears nothing of them
        self._stops = frozenset(params.stop_token_ids or ())
        self._digits = 0  # that the text ends with
        self._last: int | None = None

    @property
    def error(self) -> str:
        """Why the parser gave up, or nothing: a step's work is bounded too."""
        return self._machine.get_error()[:LONGEST_FAULT]

    @property
    def ended(self) -> bool:
        """Whether the last token completed the text and nothing can follow; an ending
        token, which ends the request by itself, does not count."""
        if self._last is None or self._last in self._never | self._stops:
            return False
        return self._machine.is_stopped() and not self._machine.is_error()

    def allowed(self) -> np.ndarray:
        """bool [V]: the tokens that may come next.

        An ending token may, if the text is complete: the model's end-of-text ids,
        and special ids among the caller's `stop_token_ids`.
        """
        mask = self._words.mask(self._machine)
        mask[list(self._never)] = False
        if self._is_json and self._digits >= MAX_DIGITS:
            shorter = mask & ~self._words.digits
            mask = shorter if shorter.any() else mask
        if self._machine.is_accepting():
            mask[self._ends] = True
        return mask

    def block(self, row: np.ndarray) -> None:
        """Set to -inf what may not come next, in one row of logits [V]."""
        row[~self.allowed()] = -np.inf

    def advance(self, token: int) -> None:
        """Take note of a token; one that the grammar forbids leaves an `error`."""
        self._last = token
        if token not in self._never:
            self._machine.consume_token(token)
            self._count_digits(self._words.pieces[token])

    def _count_digits(self, piece: bytes) -> None:
        rest = len(piece.rstrip(b"0123456789"))
        self._digits = len(piece) - rest + (0 if rest else self._digits)


class Grammars:
    """Compiles grammars for one vocabulary. Safe to call from several threads.

    `pieces` gives the bytes of every id; an id in `special_ids` is never text.
    """

    def __init__(
        self,
        pieces: Callable[[], Sequence[bytes]],
        special_ids: Iterable[int],
        vocab_size: int,
        eos_ids: Iterable[int],
    ) -> None:
        self._pieces = pieces
        self._special = frozenset(special_ids)
        self._vocab_size = vocab_size
        self._eos = frozenset(i for i in eos_ids if 0 <= i < vocab_size)
        self._lock = threading.Lock()
        self._words: _Words | None = None  # made at the first request that asks
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def check(self, wish: StructuredOutputsParams) -> None:
        """Compile, so that a later `matcher` is quick; UserError naming the fault."""
        self._machine(wish)

    def matcher(self, params: SamplingParams) -> Matcher:
        """A matcher at the beginning of what `params` wish for."""
        assert params.structured_outputs is not None
        machine, words = self._machine(params.structured_outputs)
        return Matcher(machine, words, params)

    def _machine(self, wish: StructuredOutputsParams) -> tuple[Any, _Words]:
        """A parser of its own, copied from the compiled one."""
        source = source_of(wish)
        with self._lock:
            words = self._words = self._words or self._make_words(wish)
            machine = self._compiled.pop(source, None)
            if machine is None:
                machine = words.compile(source, wish)
            self._compiled[source] = machine
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
            return machine.deep_copy(), words

    def _make_words(self, wish: StructuredOutputsParams) -> _Words:
        if not self._eos:
            raise wish.fault("needs a model with an end-of-text token")
        pieces = list(self._pieces()[: self._vocab_size])
        pieces += [b""] * (self._vocab_size - len(pieces))
        return _Words(_library(wish), pieces, self._special, self._eos)


class _Words:
    """One vocabulary as the library wants it."""

    def __init__(
        self,
        library: Any,
        pieces: list[bytes],
        special: frozenset[int],
        eos: frozenset[int],
    ) -> None:
        self.pieces, self.special, self.eos = pieces, special, eos
        self.digits = np.array([b"0" <= p[:1] <= b"9" for p in pieces])
        self._library = library
        wrapper = library.TokenizerWrapper(_Pieces(pieces, special, min(eos)))
        self._vocabulary = library.LLTokenizer(wrapper, eos_token=sorted(eos))
        # The library stops a parser that has used up its fuel: about 50 ms at most.
        self._limits = library.LLParserLimits(verbose_errors=False)

    def compile(self, source: str, wish: StructuredOutputsParams) -> Any:
        """A parser at the beginning of `source`; UserError if there can be none."""
        machine = self._library.LLMatcher(
            self._vocabulary, source, log_level=0, limits=self._limits
        )
        if not machine.is_error():
            mask = self.mask(machine)
            mask[list(self.eos)] = False
            if not mask.any() and not machine.is_accepting():
                raise wish.fault(f"has a {wish.kind} that no text can satisfy")
        if machine.is_error():
            reason = machine.get_error()[:LONGEST_FAULT]
            raise wish.fault(f"has a {wish.kind} that can't be used: {reason}")
        return machine

    def mask(self, machine: Any) -> np.ndarray:
        """bool [V]: what the library allows; nothing after an error."""
        bits = np.zeros((len(self.pieces) + 31) // 32, dtype=np.uint32)
        if not machine.is_error():
            machine.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        found = np.unpackbits(bits.view(np.uint8), bitorder="little")
        return found[: len(self.pieces)].view(bool)


class _Pieces:
    """What the library reads of a tokenizer. It never asks for text's ids: `HEADER`
    turns that off."""

    def __init__(self, pieces: list[bytes], special: frozenset[int], eos: int) -> None:
        self.tokens = pieces
        self.special_token_ids = sorted(i for i in special if i < len(pieces))
        self.eos_token_id = eos
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """No ids: nothing is forced."""
        return []


def _library(wish: StructuredOutputsParams) -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise NotSupported(
            f"{wish.source} needs the package llguidance: pip install llguidance.",
            wish.source,
        ) from None


# What was asked, in the library's own notation.
def source_of(wish: StructuredOutputsParams) -> str:
    """The grammar's text, which is also its name; UserError if it can't be written.

    A schema of more than `MAX_SIZE` characters, or nested deeper than `MAX_DEPTH`, is
    refused before it is parsed any further.
    """
    if wish.kind == "json":
        return _json_source(wish, _schema(wish))
    if wish.kind == "json_object":
        return _json_source(wish, {"type": "object"})
    text = wish.grammar or wish.regex
    if text is None:
        text = "|".join(_literal(choice) for choice in wish.choice or ())
    _check_size(wish, len(text))
    if wish.grammar is not None:
        return HEADER + _lark(wish, text)
    library = _library(wish)
    return f"{HEADER}start: /{library.regex_to_lark(text, '')}/"


def _json_source(wish: StructuredOutputsParams, schema: dict[str, Any]) -> str:
    options: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE}
    if wish.whitespace_pattern is not None:
        options = {"whitespace_pattern": wish.whitespace_pattern}
    if wish.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    _check_size(wish, len(text))
    return f"{HEADER}start: %json {text}"


def _schema(wish: StructuredOutputsParams) -> dict[str, Any]:
    schema = wish.json
    if isinstance(schema, str):
        _check_size(wish, len(schema))
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wish.fault(f"has a json that is not valid JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise wish.fault(
            f"has a json that is no schema: an object, or true, but {schema!r:.80}"
        )
    _check_depth(wish, schema)
    return closed(schema) if wish.disable_additional_properties else schema


def _check_size(wish: StructuredOutputsParams, size: int) -> None:
    if size > MAX_SIZE:
        raise wish.fault(
            f"has a {wish.kind} of {size} characters; the limit is {MAX_SIZE}"
        )


def _check_depth(wish: StructuredOutputsParams, schema: Any) -> None:
    """Level by level, so that no depth can overflow the stack."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise wish.fault(
                f"has a json nested more than {MAX_DEPTH} levels deep, the limit"
            )
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [x for some in inner for x in some if isinstance(x, dict | list)]


def closed(schema: Any) -> Any:
    """The schema, where every object that lists properties allows no others, unless it
    says so itself."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict):
        inner.setdefault("additionalProperties", False)
    return inner


def _literal(text: str) -> str:
    """An expression that matches `text` and nothing else."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)


def _lark(wish: StructuredOutputsParams, text: str) -> str:
    """A grammar in Lark's notation; one in EBNF (GBNF) is translated."""
    _library(wish)
    translate = import_module("llguidance.gbnf_to_lark").any_to_lark
    try:
        return translate(text)
    except Exception as error:  # the translator raises bare exceptions
        raise wish.fault(f"has a grammar that can't be read: {error}") from None
