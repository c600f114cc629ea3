"""``POST /v1/chat/completions``."""

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
from crossdock.serving.prompts import message_values, text_prompts
from crossdock.serving.protocol.requests import ChatBody
from crossdock.serving.protocol.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    ChatTokenLogprob,
    Usage,
)
from crossdock.serving.totals import Totals, new_totals
from crossdock.serving.validation import TokenLimits, check_chat, make_plan


async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation through the checkpoint's chat template."""
    return await answered(
        request,
        ChatBody,
        chat_plan,
        lambda body, frontend, plan: ChatAnswerBuilder(frontend=frontend, body=body, plan=plan),
    )


async def chat_plan(body: ChatBody, frontend: Frontend, probe: bool) -> GenerationPlan:
    """The checked plan of a body; raises ``RequestError``."""
    frontend.model.check_name(body.model)
    check_chat(body, takes_tools=frontend.chat_template.takes_tools)
    text = frontend.chat_template.render(
        message_values(body.messages),
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt,
        arguments=body.chat_template_kwargs or {},
    )
    # The template writes the special tokens itself.
    prompts = await text_prompts([text], "messages", frontend.tokenizer, add_special_tokens=False)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return make_plan(
        body,
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompts=prompts,
        prompt_field="messages",
        model=frontend.model,
        limits=TokenLimits(
            max_tokens=asked,
            max_tokens_field="max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens",
            min_tokens=body.min_tokens or 0,
            default_tokens=None,
        ),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        is_health_check=probe,
    )


@attrs.define(kw_only=True)
class _ChoiceState:
    texts: list[str] = attrs.Factory(list)
    logprobs: list[ChatTokenLogprob] = attrs.Factory(list)
    begun: bool = False
    last: ChoiceDelta | None = None


def _new_states(answer: ChatAnswerBuilder) -> list[_ChoiceState]:
    return [_ChoiceState() for _ in range(answer.plan.num_choices)]


def _new_totals(answer: ChatAnswerBuilder) -> Totals:
    return new_totals(answer.plan)


@attrs.define(kw_only=True, eq=False)
class ChatAnswerBuilder:
    """Builds the response or the chunks of one conversation from its deltas."""

    frontend: Frontend
    body: ChatBody
    plan: GenerationPlan
    created: int = attrs.Factory(lambda: int(time.time()))
    totals: Totals = attrs.field(init=False, default=attrs.Factory(_new_totals, takes_self=True))
    _states: list[_ChoiceState] = attrs.field(init=False, default=attrs.Factory(_new_states, takes_self=True))

    def take(self, delta: ChoiceDelta) -> None:
        """Keeps one delta for ``response``."""
        self.totals.add(delta)
        state = self._states[delta.index]
        state.texts.append(delta.text)
        logprobs = self._logprobs(delta)
        if logprobs is not None:
            state.logprobs.extend(logprobs.content)
        state.last = delta

    def response(self) -> ChatResponse:
        """The whole answer, choices in index order."""
        return ChatResponse(
            id=self.plan.request_id,
            object="chat.completion",
            created=self.created,
            model=self.frontend.model.model_id,
            choices=[self._choice(index, state) for index, state in enumerate(self._states)],
            usage=self.totals.usage(),
        )

    def chunks(self, batch: list[ChoiceDelta]) -> Iterator[ChatChunk]:
        """A chunk for each delta that has something to say, if only how many tokens there are, where each chunk is to tell; a choice's first
        chunk has the role.
        """
        options = self.body.stream_options
        with_usage = options is not None and bool(options.continuous_usage_stats)
        for delta in batch:
            self.totals.add(delta)
            state = self._states[delta.index]
            if not state.begun:
                state.begun = True
                yield self._chunk([_chunk_choice(delta.index, ChatDelta(role="assistant", content=""))])
            logprobs = self._logprobs(delta)
            if delta.text or logprobs is not None or (with_usage and delta.finish_reason is None):
                yield self._chunk([_chunk_choice(delta.index, ChatDelta(content=delta.text), logprobs)])
            if delta.finish_reason is not None:
                yield self._chunk([_last_choice(delta)])

    def last_chunks(self) -> Iterator[ChatChunk]:
        """The usage chunk, where it was asked for."""
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._chunk([], self.totals.usage())

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if not self.body.logprobs or not delta.logprobs:
            return None
        return self.frontend.logprob_format.chat(delta.logprobs, self.body.top_logprobs or 0)

    def _choice(self, index: int, state: _ChoiceState) -> ChatChoice:
        last = state.last
        return ChatChoice(
            index=index,
            message=ChatAnswer(role="assistant", content="".join(state.texts)),
            logprobs=ChatLogprobs(content=state.logprobs) if self.body.logprobs else None,
            finish_reason="abort" if last is None or last.finish_reason is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        options = self.body.stream_options
        if usage is None and options is not None and options.continuous_usage_stats:
            usage = self.totals.usage()
        return ChatChunk(
            id=self.plan.request_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.frontend.model.model_id,
            choices=choices,
            usage=usage,
        )


def _chunk_choice(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)


def _last_choice(delta: ChoiceDelta) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=ChatDelta(),
        logprobs=None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
