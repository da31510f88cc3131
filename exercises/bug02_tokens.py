# Exercise bug2 · Tokens: find the bug.
#
# This is pagedattn/text/detokenizer.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Chinese arrives whole, and so does an emoji at the start of a line. An emoji after
#     a space comes as two U+FFFD, streamed or not.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug2    the engine's own tests on your file, and one hint
#     make hint N=bug2        a hint alone
#     make reset N=bug2       this file as it was; yours is kept beside it
#
# The idea is in book/02_tokens.ipynb.
#
# Made from pagedattn/text/detokenizer.py by exercises/tools.py. Untouched: 107fe41fb75f

"""Text of one request while its tokens arrive, in time linear in the text.

Knows characters that span tokens, skipped special tokens, stop strings and what may
already be shown. Does not know why tokens come or who reads the text.
"""

import codecs
from collections.abc import Sequence

from pagedattn.text.stop import StopMatcher, StopStrings
from pagedattn.text.tokenizer import Tokenizer


class TextStream:
    """Ids in, text out, holding back only an unfinished character.

    All `push` results and `finish` joined are `tokenizer.decode(ids)` for the same
    flags, whatever the ids; after a prompt they are what `decode(prompt + ids)` adds
    to `decode(prompt)`, and a character that the prompt left unfinished comes whole.
    Ids that the vocabulary lacks (a padded output head can choose them) add no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._pieces = tokenizer.pieces()
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._size = tokenizer.vocab_size
        self._unfinished = b""
        self._at_start = tokenizer.strip_lead
        self._read_prompt(prompt_ids)

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Leave the decoder as the prompt's last bytes do; 3 hold any unfinished
        character. A prompt that shows text has taken the leading space with it."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= 3:
                break
        self._decode(tail, final=False)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skip or not 0 <= token_id < self._size:
            return b""
        return self._pieces[token_id]

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        return self._decode(self._bytes(token_id), final=False)

    def finish(self) -> str:
        """What an unfinished character at the end reads as: one U+FFFD, or ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        """Read what is certain; keep at most 3 bytes, the start of a character."""
        data = self._unfinished + data
        text, read = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = b"" if text else data[read:]
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class Detokenizer:
    """A request's output text, cut at stop strings.

    `push` tokens as they are sampled, `take` what may be shown, `finish` once. After
    `finish`, everything taken, joined, is `text`: the decoded output up to the first
    stop string that completes in a token after the first `min_tokens`, without it
    unless `include_stop_str_in_output`. No part of that stop string is taken before.
    `num_tokens` counts the tokens that belong to the output: all pushed, up to and
    with the one in which the stop string completed; callers cut ids and logprobs there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer, prompt_ids, skip_special_tokens)
        self._include = include_stop_str_in_output
        self._matcher = (
            StopMatcher(StopStrings(stop), include_stop_str_in_output) if stop else None
        )
        self._min_tokens = min_tokens
        self._read: list[str] = []
        self._fresh: list[str] = []
        self.num_tokens = 0
        self.stopped: str | None = None
        self.finished = False

    def push(self, token_ids: Sequence[int], stop_token: bool = False) -> str | None:
        """Take tokens; return the stop string that one of them completes, or None.

        Tokens after that one are not looked at. `stop_token`: the last id is the EOS
        or stop token that ended the request, which counts as a token but is text only
        with `include_stop_str_in_output`.
        """
        assert self.stopped is None and not self.finished, "output has already ended"
        hidden = stop_token and not self._include
        for token_id in token_ids[: len(token_ids) - hidden]:
            self.num_tokens += 1
            self._release(self._stream.push(token_id))
            if self.stopped is not None:
                return self.stopped
        self.num_tokens += hidden
        return None

    def finish(self) -> str | None:
        """Release everything still held back; return the stop string, if any ended it.

        An unfinished last character may itself complete one (as U+FFFD). Idempotent.
        """
        if not self.finished and self.stopped is None:
            self._release(self._stream.finish())
            if self._matcher is not None:
                self._fresh.append(self._matcher.flush())
        self.finished = True
        return self.stopped

    def take(self) -> str:
        """The text released since the last `take`: one delta."""
        delta = "".join(self._fresh)
        self._fresh.clear()
        self._read.append(delta)
        return delta

    @property
    def text(self) -> str:
        """All text released so far, taken or not."""
        self._read = ["".join(self._read)]
        return self._read[0] + "".join(self._fresh)

    def _release(self, text: str) -> None:
        if self._matcher is not None and text:
            armed = self.num_tokens > self._min_tokens
            text, self.stopped = self._matcher.feed(text, armed)
        if text:
            self._fresh.append(text)
