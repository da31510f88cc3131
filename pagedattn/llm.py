"""`LLM`: the engine as a plain Python object, for scripts and notebooks.

Prompts in, answers out, in the same order; it sets no signal handlers and starts no
threads. Built in chapter 09.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from tqdm import tqdm

from pagedattn.assembly import assemble
from pagedattn.config import EngineArgs
from pagedattn.engine import Engine
from pagedattn.errors import UserError
from pagedattn.intake import Ask, Prompt
from pagedattn.model.cores import pin_threads
from pagedattn.request import RequestOutput, RequestOutputKind, SamplingParams
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = list[dict[str, Any]]


class LLM:
    """A model and everything it needs; keyword arguments are `EngineArgs` fields."""

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        try:
            args = EngineArgs(model=model, **engine_args)
        except TypeError as error:
            raise UserError(f"LLM: {error}") from None
        parts = assemble(args)
        pin_threads(parts.cores)
        self.llm_engine: Engine = parts.engine
        self.model_name = parts.model_name
        self.chat_template: ChatTemplate | None = parts.chat_template
        self._defaults = parts.sampling_defaults
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; output i belongs to prompt i.

        A prompt is text, token ids, or {"prompt": …} / {"prompt_token_ids": …}, with
        "cache_salt" if wanted. One params for all, one for each, or None for the
        model's defaults. A bad prompt raises before any starts.
        """
        return self._run(_as_list(prompts), sampling_params, priority, use_tqdm, True)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        if not messages:
            raise UserError("messages is empty.", "messages")
        several = messages if isinstance(messages[0], list) else [messages]
        template = ChatTemplate(chat_template) if chat_template else self.chat_template
        if template is None:
            raise UserError(
                "this model brings no chat template: pass chat_template=…",
                "chat_template",
            )
        prompts = [
            template.render(
                conversation,
                tokenizer=self.get_tokenizer(),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        return self._run(prompts, sampling_params, None, use_tqdm, False)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where it is given none."""
        return SamplingParams(**self._defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        assert self.llm_engine.tokenizer is not None
        return self.llm_engine.tokenizer

    def get_metrics(self) -> list[Any]:
        """Counters, gauges and histograms, under vLLM's names."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, changing nothing, while requests run."""
        return self.llm_engine.scheduler.reset_prefix_cache()

    # All prompts are accepted before the first is queued.
    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        priority: Sequence[int] | None,
        use_tqdm: bool,
        special: bool,
    ) -> list[RequestOutput]:
        each = self._params_for(prompts, params)
        ranks = priority if priority is not None else [0] * len(prompts)
        if len(ranks) != len(prompts):
            raise UserError(
                f"priority has {len(ranks)} entries for {len(prompts)} prompts.",
                "priority",
            )
        intake = self.llm_engine.intake
        asks = [
            intake.accept(
                f"llm-{next(self._ids)}", p, s, priority=r, add_special_tokens=special
            )
            for p, s, r in zip(prompts, each, ranks, strict=True)
        ]
        return self._finish(asks, use_tqdm)

    def _params_for(
        self, prompts: Sequence[Prompt], params: Params
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"sampling_params has {len(params)} entries "
                f"for {len(prompts)} prompts.",
                "sampling_params",
            )
        return [replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for p in params]

    def _finish(self, asks: Sequence[Ask], use_tqdm: bool) -> list[RequestOutput]:
        engine, done = self.llm_engine, {}
        own = {ask.id for ask in asks}
        try:
            for ask in asks:
                engine.add(ask)
            with _progress(len(asks), use_tqdm) as bar:
                while len(done) < len(asks):
                    for output in engine.step():
                        if output.request_id in own:
                            done[output.request_id] = output
                            _advance(bar, output)
        finally:  # interrupted: leave nothing behind
            for ask in asks:
                engine.abort_request(ask.id)
        return [done[ask.id] for ask in asks]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one: text, a dict, or ids."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts must be text, token ids or a list, got {prompts!r}.", "prompts"
        )
    prompts = list(prompts)
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]
    return prompts


def _progress(total: int, show: bool) -> Any:
    return tqdm(total=total, desc="Prompts", disable=not show, dynamic_ncols=True)


def _advance(bar: Any, output: RequestOutput) -> None:
    bar.update()
    if bar.disable:
        return
    bar.tokens = getattr(bar, "tokens", 0) + sum(
        len(o.token_ids) for o in output.outputs
    )
    seconds = bar.format_dict["elapsed"] or 1e-9
    bar.set_postfix_str(f"{bar.tokens / seconds:.1f} output tokens/s", refresh=False)
