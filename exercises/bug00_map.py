# Exercise bug0 · The map: find the bug.
#
# This is pagedattn/intake.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     One caller asks for two answers to one prompt (n=2), and a few steps later the
#     engine is dead, for everybody: "requests wait, but none of them can be planned".
#     In the text that was streamed until then, each answer seems to know what the other
#     has just said. With n=1 everything is right, and so are two requests with the same
#     prompt.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug0    the engine's own tests on your file, and one hint
#     make hint N=bug0        a hint alone
#     make reset N=bug0       this file as it was; yours is kept beside it
#
# The idea is in book/00_map.ipynb.
#
# Made from pagedattn/intake.py by exercises/tools.py. Untouched: e216027f81b6

"""A caller's prompt and wishes -> requests that the scheduler can take.

Everything that can be wrong with a request is found here, before any work: an empty
or too long prompt, ids outside the vocabulary, limits of the model and the pool.
Knows tokenizers and sampling parameters; knows nothing of blocks or tensors. Built in
chapter 09.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedattn.config import EngineConfig
from pagedattn.errors import NotSupported, UserError
from pagedattn.request import Request, SamplingParams, StructuredOutputsParams
from pagedattn.text.tokenizer import Tokenizer

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One accepted prompt: its text if it came as text, and a request per sibling."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    requests: list[Request]


class Intake:
    """Turns prompts into requests for one model and pool.

    `capacity` is what a request alone in the pool can hold; `eos_ids` end a text;
    `check_grammar` compiles what an answer must be, or raises UserError.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: int,
        vocab_size: int,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        check_grammar: Callable[[StructuredOutputsParams], None] | None = None,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.tokenizer = tokenizer
        self._check_grammar = check_grammar
        self._seeds = random.Random(config.seed)

    def accept(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        pooling: str | None = None,
    ) -> Ask:
        """The requests that `prompt` asks for; UserError, with nothing done, if it
        can't be served. With `pooling` hidden states are wanted, and no tokens."""
        if not isinstance(params, SamplingParams):
            raise UserError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}.",
                "sampling_params",
            )
        params.check_model(self.vocab_size, self.config.max_logprobs)
        self._check_priority(priority)
        text, ids, salt = self._parts(prompt, add_special_tokens)
        ids = self._fit(ids, params, 0 if pooling else 1)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise UserError("stop and bad_words need a tokenizer.", "stop")
        if params.structured_outputs is not None:
            self._check_wish(params.structured_outputs)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # One sibling scores the prompt for all, so the others may hit its blocks.
        unscored = replace(params, prompt_logprobs=None)
        bad_words = self._bad_words(params.bad_words)
        requests = [
            self._request(
                id,
                ids,
                unscored if sibling else params,
                seed,
                sibling,
                priority,
                salt,
                bad_words,
                pooling,
            )
            for sibling in range(params.n)
        ]
        return Ask(id, text, ids, params, requests)

    def _check_wish(self, wish: StructuredOutputsParams) -> None:
        if self._check_grammar is None:
            raise wish.fault("needs a tokenizer")
        self._check_grammar(wish)

    def _request(
        self,
        id: str,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        sibling: int,
        priority: int,
        salt: str | None,
        bad_words: tuple[tuple[int, ...], ...],
        pooling: str | None,
    ) -> Request:
        longest = min(self.config.max_model_len, self.capacity + 1)
        most = longest - len(ids) if params.max_tokens is None else params.max_tokens
        return Request(
            id=id if params.n == 1 else f"{sibling}_{id}",
            tokens=ids,
            params=params,
            limit=len(ids) + 1 if pooling else min(len(ids) + most, longest),
            seed=seed,
            sibling=sibling,
            priority=priority,
            eos_ids=self.eos_ids,
            bad_words_ids=bad_words,
            first_block_keys=(("salt", salt),) if salt is not None else (),
            pooling=pooling,
        )

    # The prompt: text, ids, or a dict with either and a salt.
    def _parts(
        self, prompt: Prompt, add_special_tokens: bool
    ) -> tuple[str | None, list[int], str | None]:
        salt = None
        if isinstance(prompt, dict):
            for key in prompt.keys() - PROMPT_KEYS:
                raise NotSupported(f"prompt key {key!r} is not supported.", "prompt")
            salt = _checked_salt(prompt)
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens), salt
        return None, self._checked_ids(prompt), salt

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise UserError(
                "a text prompt needs a tokenizer; give token ids.", "prompt"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _checked_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, bytes) or not isinstance(ids, Iterable):
            raise UserError(
                f"prompt must be text or token ids, got {type(ids).__name__}.", "prompt"
            )
        ids = list(ids)
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int):
                raise UserError(f"prompt holds {i!r}, which is no token id.", "prompt")
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"prompt holds token id {i}; the vocabulary has {self.vocab_size}.",
                    "prompt",
                )
        return ids

    def _fit(self, ids: list[int], params: SamplingParams, room: int) -> list[int]:
        """The prompt as it will run, cut if asked; refused if it can't fit, with
        `room` for the first token after it."""
        longest = min(self.config.max_model_len - room, self.capacity)
        keep = params.truncate_prompt_tokens
        if keep is not None:
            ids = ids[-(longest if keep == -1 else keep) :]
        if not ids:
            raise UserError("the prompt is empty: it has no tokens.", "prompt")
        if len(ids) > longest:
            raise UserError(
                f"the prompt has {len(ids)} tokens; the context length is "
                f"{self.config.max_model_len}"
                f"{' and must leave room for one more' * room}, and "
                f"the KV pool holds {self.capacity} tokens of one request.",
                "prompt",
            )
        return ids

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(
                f"priority must be an integer, got {priority!r}.", "priority"
            )
        if priority and self.config.policy != "priority":
            raise UserError(
                f"priority={priority} needs --scheduling-policy priority.", "priority"
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled inside a text and at a word's start."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)


def _checked_salt(prompt: dict[str, Any]) -> str | None:
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise UserError(
            f"cache_salt must be a non-empty string, got {salt!r}.", "cache_salt"
        )
    return salt
