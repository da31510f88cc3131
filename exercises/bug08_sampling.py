# Exercise bug8 · Sampling: find the bug.
#
# This is pagedattn/sampling/state.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     A service asks for min_tokens=100. With most models it works. With a few, answers
#     of three tokens come back now and then, finish_reason "stop", although nothing in
#     the request could end them so early.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug8    the engine's own tests on your file, and one hint
#     make hint N=bug8        a hint alone
#     make reset N=bug8       this file as it was; yours is kept beside it
#
# The idea is in book/08_sampling.ipynb.
#
# Made from pagedattn/sampling/state.py by exercises/tools.py. Untouched: 2a57b48aa378

"""What the runner remembers of one request to sample its next token.

Knows the request's parameters, seed and tokens, as ids; it does not know text,
logits, or how the tokens were computed. Made again from the same tokens after a
preemption, it is the same state. Built in chapter 08.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedattn.request import SamplingParams
from pagedattn.sampling.grammar import Matcher

Ids = np.ndarray  # int64 [n]: token ids


class TokenCounts:
    """The distinct tokens seen, and how often each was generated; O(1) a token.

    A prompt token counts as seen and as generated 0 times.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> Ids:
        """int64 [n]: the distinct tokens, in the order of their first appearance."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """int64 [n]: how often each of `ids` was generated."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """Count one generated token."""
        i = self._place.setdefault(token, len(self._place))
        if i == len(self._ids):
            self._grow()
        self._ids[i] = token
        self._counts[i] += 1

    def _grow(self) -> None:
        room = np.zeros(len(self._ids) + 16, dtype=np.int64)  # doubles, at least 16
        self._ids = np.concatenate((self._ids, room))
        self._counts = np.concatenate((self._counts, room))


@dataclass(slots=True, eq=False)
class SampleState:
    """One request's parameters, seed and tokens, and what is worked out from them.

    `output_ids` is copied; afterwards only `append` changes it. `eos_ids` are all the
    model's end-of-text ids: with `stop_token_ids` they are what `min_tokens` holds
    back. `bad_words_ids` are the bad words as token ids. Ids outside the vocabulary,
    which no row of logits has, are left out of every mask and penalty. `grammar` is at
    its beginning, and follows the output from here on.
    """

    params: SamplingParams
    seed: int
    vocab_size: int
    prompt_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=list)
    sibling: int = 0
    eos_ids: Iterable[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    grammar: Matcher | None = None
    plain: bool = field(init=False)  # the most likely token, and nothing else, always
    counts: TokenCounts | None = field(init=False)  # where a penalty needs them
    held_ids: Ids = field(init=False)
    allowed_ids: Ids | None = field(init=False)
    bias: tuple[Ids, np.ndarray] | None = field(init=False)  # ids, float32 amounts

    def __post_init__(self) -> None:
        params = self.params
        self.output_ids = list(self.output_ids)
        held = (*sorted(self.eos_ids)[:1], *params.stop_token_ids)
        self.held_ids = self._known(sorted(set(held)))
        allowed = params.allowed_token_ids
        self.allowed_ids = None if allowed is None else self._known(allowed)
        self.bias = self._bias(params.logit_bias or {})
        self.bad_words_ids = self._words(self.bad_words_ids)
        self.counts = self._counts()
        nothing_asked = params.logprobs is None and not params.min_tokens
        self.plain = params.greedy and nothing_asked and not self.shaped
        if self.grammar is not None:
            for token in self.output_ids:
                self.grammar.advance(token)

    def _known(self, ids: Iterable[int]) -> Ids:
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return np.array(known, dtype=np.int64)

    def _bias(self, bias: dict[int, float]) -> tuple[Ids, np.ndarray] | None:
        ids = self._known(bias)
        amounts = np.array([bias[i] for i in ids.tolist()], dtype=np.float32)
        return (ids, amounts) if len(ids) else None

    def _words(self, words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(w) for w in words if w and len(self._known(w)) == len(w))

    def _counts(self) -> TokenCounts | None:
        params = self.params
        repetition = params.repetition_penalty != 1.0
        if not (repetition or params.presence_penalty or params.frequency_penalty):
            return None
        prompt = self._known(self.prompt_ids if repetition else ())
        return TokenCounts(prompt.tolist(), self._known(self.output_ids).tolist())

    @property
    def position(self) -> int:
        """Where the next token will stand: prompt and output tokens before it."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no draw."""
        return self.params.greedy

    @property
    def holding(self) -> bool:
        """Whether `min_tokens` still holds the ending tokens back."""
        return len(self.output_ids) < self.params.min_tokens and len(self.held_ids) > 0

    @property
    def shaped(self) -> bool:
        """Whether the next row of logits must be masked, biased or penalised."""
        return (
            self.grammar is not None
            or self.allowed_ids is not None
            or len(self.bad_words_ids) > 0
            or self.holding
            or self.bias is not None
            or self.counts is not None
        )

    @property
    def ended(self) -> bool:
        """Whether a grammar is complete and nothing can follow."""
        return self.grammar is not None and self.grammar.ended

    @property
    def num_logprobs(self) -> int | None:
        """How many top log-probabilities each sampled token brings; None: none asked.

        0 asks for the sampled token's own; -1 of the caller is the whole vocabulary.
        """
        return self._many(self.params.logprobs)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same, for each prompt token."""
        return self._many(self.params.prompt_logprobs)

    def _many(self, wanted: int | None) -> int | None:
        return self.vocab_size if wanted == -1 else wanted

    def append(self, token: int) -> None:
        """Take note of a sampled token; O(1)."""
        self.output_ids.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.grammar is not None:
            self.grammar.advance(token)
