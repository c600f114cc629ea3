"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import attrs
from aiohttp import web

from crossdock.serving.answering import answered
from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.frontend import Frontend
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.prompts import prompt_tokens
from crossdock.serving.protocol.requests import CompletionBody
from crossdock.serving.protocol.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from crossdock.serving.totals import Totals, new_totals
from crossdock.serving.validation import (
    DEFAULT_COMPLETION_TOKENS,
    TokenLimits,
    check_completion,
    completion_max_tokens,
    make_plan,
)
from crossdock.types.request import TokenLogprob


async def post_completions(request: web.Request) -> web.StreamResponse:
    """Completes prompts given as text or token ids."""
    return await answered(
        request,
        CompletionBody,
        completion_plan,
        lambda body, frontend, plan: CompletionAnswer(frontend=frontend, body=body, plan=plan),
    )


async def completion_plan(body: CompletionBody, frontend: Frontend, probe: bool) -> GenerationPlan:
    """The checked plan of a body; raises ``RequestError``."""
    frontend.model.check_name(body.model)
    check_completion(body)
    return make_plan(
        body,
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=await prompt_tokens(
            body.prompt, "prompt", frontend.tokenizer, add_special_tokens=body.add_special_tokens
        ),
        prompt_field="prompt",
        model=frontend.model,
        limits=TokenLimits(
            max_tokens=completion_max_tokens(body),
            max_tokens_field="max_tokens" if body.max_tokens is not None else "max_completion_tokens",
            min_tokens=body.min_tokens or 0,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
        ),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        is_health_check=probe,
    )


@attrs.define(kw_only=True)
class _ChoiceState:
    """What a choice has given out so far."""

    texts: list[str] = attrs.Factory(list)
    logprobs: list[CompletionLogprobs] = attrs.Factory(list)
    offset: int = 0
    """Characters of the token spellings so far, the base of the next ``text_offset``."""
    begun: bool = False
    last: ChoiceDelta | None = None


def _new_states(answer: CompletionAnswer) -> list[_ChoiceState]:
    return [_ChoiceState() for _ in range(answer.plan.num_choices)]


def _new_totals(answer: CompletionAnswer) -> Totals:
    return new_totals(answer.plan)


@attrs.define(kw_only=True, eq=False)
class CompletionAnswer:
    """Builds the response or the chunks of one request from its deltas."""

    frontend: Frontend
    body: CompletionBody
    plan: GenerationPlan
    created: int = attrs.Factory(lambda: int(time.time()))
    totals: Totals = attrs.field(init=False, default=attrs.Factory(_new_totals, takes_self=True))
    _states: list[_ChoiceState] = attrs.field(init=False, default=attrs.Factory(_new_states, takes_self=True))

    def take(self, delta: ChoiceDelta) -> None:
        """Keeps one delta for ``response``."""
        state = self._states[delta.index]
        text, logprobs = self._step(delta, state)
        state.texts.append(text)
        if logprobs is not None:
            state.logprobs.append(logprobs)
        state.last = delta

    def response(self) -> CompletionResponse:
        """The whole answer, choices in index order."""
        choices = [self._choice(index, state) for index, state in enumerate(self._states)]
        return self._response(choices, self.totals.usage())

    def chunks(self, batch: list[ChoiceDelta]) -> Iterator[CompletionResponse]:
        """A chunk for each delta that has something to say, if only how many tokens there are, where each chunk is to tell."""
        options = self.body.stream_options
        with_usage = options is not None and bool(options.continuous_usage_stats)
        for delta in batch:
            text, logprobs = self._step(delta, self._states[delta.index])
            if not text and delta.finish_reason is None and logprobs is None and not with_usage:
                continue
            choice = CompletionChoice(
                index=delta.index,
                text=text,
                logprobs=logprobs,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            yield self._response([choice], self.totals.usage() if with_usage else None)

    def last_chunks(self) -> Iterator[CompletionResponse]:
        """The usage chunk, where it was asked for."""
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._response([], self.totals.usage())

    def _step(self, delta: ChoiceDelta, state: _ChoiceState) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities that a delta adds, with the echoed prompt before the first."""
        self.totals.add(delta)
        text, unscored = delta.text, None
        entries: list[TokenLogprob | None] = list(delta.logprobs)
        if self.body.echo and not state.begun:
            prompt = self.plan.prompts[delta.index // self.plan.n]
            unscored = prompt.ids[0]
            text = self._prompt_text(delta.index) + text
            entries = [*delta.prompt_logprobs, *entries]
        state.begun = True
        if self.body.logprobs is None or not entries:
            return text, None
        logprobs = self.frontend.logprob_format.completion(
            entries, text_offset=state.offset, with_top=self.body.logprobs > 0, unscored_token=unscored
        )
        state.offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return text, logprobs

    def _prompt_text(self, index: int) -> str:
        prompt = self.plan.prompts[index // self.plan.n]
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.frontend.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.ids)

    def _choice(self, index: int, state: _ChoiceState) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="".join(state.texts),
            logprobs=_joined(state.logprobs) if self.body.logprobs is not None else None,
            finish_reason=None if state.last is None else state.last.finish_reason,
            stop_reason=None if state.last is None else state.last.stop_reason,
        )

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.plan.request_id,
            object="text_completion",
            created=self.created,
            model=self.frontend.model.model_id,
            choices=choices,
            usage=usage,
        )


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
