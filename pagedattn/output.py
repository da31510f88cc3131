"""What a step committed -> what callers read: text, scores, reasons, times.

One `Answer` per caller's request, one `Sequence` per sibling in it. Stop strings are
found here, since only here is text; the engine then ends the sequence's request.
Knows tokenizers and metrics; knows nothing of blocks or plans. Built in chapter 09.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagedattn.intake import Ask
from pagedattn.metrics import Metrics
from pagedattn.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestOutput,
    RequestOutputKind,
    RequestTimes,
    SamplingParams,
)
from pagedattn.scheduler import Update
from pagedattn.text.detokenizer import Detokenizer
from pagedattn.text.tokenizer import Tokenizer

Scores = dict[int, Logprob]


def scores_from(data: Any, tokenizer: Tokenizer | None) -> Scores:
    """{token id: Logprob} of one position: the most likely ones and the token's own."""
    ranked = zip(data.top_ids.tolist(), data.top_logprobs.tolist(), strict=True)
    found = {i: (value, rank) for rank, (i, value) in enumerate(ranked, 1)}
    found[data.token] = (data.logprob, int(data.rank))
    return {
        i: Logprob(value, rank, _piece(tokenizer, i))
        for i, (value, rank) in found.items()
    }


def _piece(tokenizer: Tokenizer | None, token: int) -> str | None:
    if tokenizer is None:
        return None
    return tokenizer.token_str(token) if token < tokenizer.vocab_size else ""


class Sequence:
    """One sibling's output so far, and how much of it was already handed out."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.params = request.params
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.scores: list[Scores] | None = [] if self._scored else None
        self.cumulative: float | None = 0.0 if self._scored else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = self._new_detokenizer(request)
        self._shown_tokens = 0

    @property
    def _scored(self) -> bool:
        return self.params.logprobs is not None

    def _new_detokenizer(self, request: Request) -> Detokenizer | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        params = self.params
        return Detokenizer(
            self.tokenizer,
            request.tokens[: request.prompt_len],
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def add(self, update: Update) -> bool:
        """Take one update; whether a stop string completed in it, which ends the
        sequence there, whatever else the step brought."""
        request = update.request
        ending = request.finish_reason == "stop" and not update.result.ended
        matched = self._push(update.tokens, ending)
        self.token_ids += update.tokens
        if self.scores is not None and update.result.logprobs is not None:
            data = update.result.logprobs
            self.scores.append(scores_from(data, self.tokenizer))
            self.cumulative += data.logprob
        if matched is not None:
            self._end("stop", matched)
        elif request.finish_reason is not None:
            self._end(request.finish_reason, request.stop_reason)
        return matched is not None

    def _push(self, tokens: tuple[int, ...], stop_token: bool) -> str | None:
        """The stop string that completed. An ending token is counted, but its text
        is shown only if the caller wants the stop in the output."""
        if self._detokenizer is None or not tokens:
            return None
        return self._detokenizer.push(tokens, stop_token=stop_token)

    def end(self, reason: str) -> None:
        """End without a further token."""
        if self.finish_reason is None:
            self._end(reason, None)

    def _end(self, reason: str, stop: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop
        if self._detokenizer is not None and not self._detokenizer.finished:
            # An unfinished character at the end reads as U+FFFD, which is text too.
            matched = self._detokenizer.finish()
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched

    def output(self, delta: bool) -> CompletionOutput:
        """What there is so far, or what came since the last call."""
        first = self._shown_tokens if delta else 0
        self._shown_tokens = len(self.token_ids)
        return CompletionOutput(
            index=self.request.sibling,
            text=self._text(delta),
            token_ids=self.token_ids[first:],
            cumulative_logprob=self.cumulative,
            logprobs=None if self.scores is None else self.scores[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _text(self, delta: bool) -> str:
        if self._detokenizer is None:
            return ""
        new = self._detokenizer.take()
        return new if delta else self._detokenizer.text


@dataclass(slots=True)
class Answer:
    """One caller's request: its prompt, its sequences, its clock readings."""

    ask: Ask
    sequences: list[Sequence]
    times: RequestTimes
    changed: set[int] = field(default_factory=set)
    shown: bool = False  # whether any output was handed out
    prompt_scores: dict[int, Scores] = field(default_factory=dict)
    pooled: Any = None
    last_seen: dict[int, float] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """The caller's sampling parameters."""
        return self.ask.params

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return None not in [s.finish_reason for s in self.sequences]

    def output(self) -> RequestOutput | None:
        """What the caller is due now; None where nothing is due yet. An answer that
        has ended is closed first."""
        kind, finished = self.params.output_kind, self.times.finished is not None
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        which = sorted(self.changed) if delta else range(len(self.sequences))
        self.changed.clear()
        shown, self.shown = self.shown, True
        return RequestOutput(
            request_id=self.ask.id,
            prompt=self.ask.prompt,
            prompt_token_ids=self.ask.prompt_ids,
            prompt_logprobs=None if delta and shown else self._prompt_logprobs(),
            outputs=[self.sequences[i].output(delta) for i in which],
            finished=finished,
            num_cached_tokens=self.ask.requests[0].cached,
            metrics=self.times,
            pooled=self.pooled,
        )

    def _prompt_logprobs(self) -> list[Scores | None] | None:
        """One entry for each prompt token, None for the first, once all are there."""
        if self.params.prompt_logprobs is None:
            return None
        if len(self.prompt_scores) < len(self.ask.prompt_ids) - 1:
            return None
        return [None, *(scores for _, scores in sorted(self.prompt_scores.items()))]


class Outputs:
    """All answers under way."""

    def __init__(self, tokenizer: Tokenizer | None, metrics: Metrics) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._answers: dict[str, Answer] = {}
        self._of_request: dict[str, tuple[Answer, int]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, id: str) -> bool:
        """Whether an answer or one of its sequences goes by this id."""
        return id in self._answers or id in self._of_request

    def add(self, ask: Ask, now: float) -> None:
        """Expect updates for every request of `ask`."""
        sequences = [Sequence(request, self.tokenizer) for request in ask.requests]
        answer = Answer(ask, sequences, RequestTimes(arrival=now))
        self._answers[ask.id] = answer
        for i, request in enumerate(ask.requests):
            self._of_request[request.id] = (answer, i)

    def scheduled(self, request_id: str, now: float) -> None:
        """A request ran for the first time."""
        answer, _ = self._of_request[request_id]
        if answer.times.scheduled is None:
            answer.times.scheduled = now

    def process(
        self, updates: Iterable[Update], now: float
    ) -> tuple[list[RequestOutput], list[str]]:
        """What callers are due after these updates, and the ids of requests in which
        a stop string completed: the scheduler must end those."""
        touched: dict[str, Answer] = {}
        stopped, tokens = [], 0
        for update in updates:
            if update.request.id not in self._of_request:
                continue
            answer, i = self._of_request[update.request.id]
            tokens += len(update.tokens)
            if self._take(answer, i, update, now):
                stopped.append(update.request.id)
            if i in answer.changed:
                touched[answer.ask.id] = answer
        self.metrics.on_tokens(tokens)
        return self._due(touched.values(), now), stopped

    def _take(self, answer: Answer, i: int, update: Update, now: float) -> bool:
        sequence = answer.sequences[i]
        for position, data in update.result.prompt_logprobs:
            answer.prompt_scores[position] = scores_from(data, self.tokenizer)
        if update.result.pooled is not None:
            answer.pooled = update.result.pooled
        matched = sequence.add(update)
        if update.tokens:
            self._clock(answer, i, now)
        if update.tokens or sequence.finish_reason is not None:
            answer.changed.add(i)
        return matched

    def _clock(self, answer: Answer, i: int, now: float) -> None:
        last = answer.last_seen.get(i)
        answer.last_seen[i] = now
        first = now - answer.times.arrival if last is None else None
        self.metrics.on_gap(None if last is None else now - last, first)
        answer.times.last_token = now
        if answer.times.first_token is None:
            answer.times.first_token = now

    def _due(self, answers: Iterable[Answer], now: float) -> list[RequestOutput]:
        due = []
        for answer in answers:
            if answer.finished:
                self._close(answer, now)
            output = answer.output()
            if output is not None:
                due.append(output)
        return due

    def abort(self, id: str, now: float) -> tuple[list[str], RequestOutput | None]:
        """End an answer: the ids of its live requests, and its last output; nothing
        if there is no such answer."""
        answer = self._answers.get(id)
        if answer is None:
            return [], None
        live = [s for s in answer.sequences if s.finish_reason is None]
        for sequence in live:
            sequence.end("abort")
            answer.changed.add(sequence.request.sibling)
        self._close(answer, now)
        return [sequence.request.id for sequence in live], answer.output()

    def _close(self, answer: Answer, now: float) -> None:
        answer.times.finished = now
        del self._answers[answer.ask.id]
        for sequence in answer.sequences:
            del self._of_request[sequence.request.id]
            self.metrics.on_finished(
                str(sequence.finish_reason),
                len(answer.ask.prompt_ids),
                len(sequence.token_ids),
                answer.params.n,
                answer.params.max_tokens,
                answer.times,
            )
