"""``POST /generate``: token ids in, token ids out, under SGLang's names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import attrs
from aiohttp import web

from crossdock.errors import RequestError
from crossdock.serving.answering import answered
from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.frontend import Frontend
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.logprob_format import finite
from crossdock.serving.prompts import prompt_tokens
from crossdock.serving.protocol.requests import GenerateBody, GenerateSampling, SamplingFields
from crossdock.serving.protocol.responses import GenerateMeta, GenerateResponse
from crossdock.serving.request_ids import request_id, set_request_id
from crossdock.serving.validation import TokenLimits, make_plan
from crossdock.types.request import TokenLogprob

DEFAULT_NEW_TOKENS = 128


async def post_generate(request: web.Request) -> web.StreamResponse:
    """Generates from ``input_ids`` (one list or several) or ``text``; a list in gives a list out."""
    return await answered(
        request,
        GenerateBody,
        generate_plan,
        lambda body, frontend, plan: GenerateAnswer(frontend=frontend, body=body, plan=plan, client_id=request_id()),
    )


async def generate_plan(body: GenerateBody, frontend: Frontend, probe: bool) -> GenerationPlan:
    """The checked plan of a body, whose ``rid`` becomes the id of the request; raises ``RequestError``."""
    if body.rid is not None:
        if body.rid in frontend.active.values():
            raise RequestError(f"rid: {body.rid!r} is already running; ids must be unique", field="rid")
        set_request_id(body.rid)
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("input_ids: exactly one of input_ids and text must be given", field="input_ids")
    if body.top_logprobs_num and not body.return_logprob:
        raise RequestError("top_logprobs_num: only allowed with return_logprob true", field="top_logprobs_num")
    field = "text" if body.input_ids is None else "input_ids"
    sampling = body.sampling_params or GenerateSampling()
    if sampling.max_new_tokens == 0:
        message = "sampling_params.max_new_tokens: must be at least 1; /v1/completions scores a prompt with echo and max_tokens 0"
        raise RequestError(message, field="sampling_params.max_new_tokens")
    return make_plan(
        _shared_fields(sampling, body),
        request_id=f"gen-{uuid.uuid4().hex}",
        prompts=await prompt_tokens(body.input_ids if body.text is None else body.text, field, frontend.tokenizer),
        prompt_field=field,
        model=frontend.model,
        limits=TokenLimits(
            max_tokens=sampling.max_new_tokens,
            max_tokens_field="sampling_params.max_new_tokens",
            min_tokens=sampling.min_new_tokens or 0,
            default_tokens=DEFAULT_NEW_TOKENS,
        ),
        logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
        is_health_check=probe,
    )


def _shared_fields(sampling: GenerateSampling, body: GenerateBody) -> SamplingFields:
    """The sampling of ``/generate`` under the names of the OpenAI endpoints."""
    names = {field.name for field in attrs.fields(SamplingFields)}
    values = attrs.asdict(sampling, recurse=False)
    return SamplingFields(
        stream=body.stream,
        routed_dp_rank=body.routed_dp_rank,
        include_stop_str_in_output=sampling.no_stop_trim,
        **{name: value for name, value in values.items() if name in names},
    )


@attrs.define(kw_only=True)
class _ChoiceState:
    text: str = ""
    ids: list[int] = attrs.Factory(list)
    logprobs: list[TokenLogprob] = attrs.Factory(list)
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None


def _new_states(answer: GenerateAnswer) -> list[_ChoiceState]:
    return [_ChoiceState() for _ in range(answer.plan.num_choices)]


@attrs.define(kw_only=True, eq=False)
class GenerateAnswer:
    """Builds the response or the cumulative chunks of one request from its deltas."""

    frontend: Frontend
    body: GenerateBody
    plan: GenerationPlan
    client_id: str
    _states: list[_ChoiceState] = attrs.field(init=False, default=attrs.Factory(_new_states, takes_self=True))

    @property
    def is_single(self) -> bool:
        """The client sent one prompt, not a list of prompts, and wants one sample."""
        ids = self.body.input_ids
        one_prompt = isinstance(self.body.text, str) or (ids is not None and isinstance(ids[0], int))
        return one_prompt and self.plan.n == 1

    def take(self, delta: ChoiceDelta) -> None:
        """Adds one delta."""
        state = self._states[delta.index]
        state.text += delta.text
        state.ids.extend(delta.token_ids)
        state.logprobs.extend(delta.logprobs)
        state.cached_tokens += delta.cached_tokens
        if delta.finish_reason is not None:
            state.finish = {"type": delta.finish_reason}
            if delta.stop_reason is not None:
                state.finish["matched"] = delta.stop_reason
            if delta.finish_reason == "length":
                state.finish["length"] = len(state.ids)

    def response(self) -> GenerateResponse | list[GenerateResponse]:
        """One answer, or a list in the order of prompts and samples."""
        if self.is_single:
            return self._answer(0)
        return [self._answer(index) for index in range(self.plan.num_choices)]

    def chunks(self, batch: list[ChoiceDelta]) -> Iterator[GenerateResponse]:
        """Everything so far of each choice that got something."""
        for delta in batch:
            self.take(delta)
        for index in dict.fromkeys(delta.index for delta in batch):
            yield self._answer(index)

    def last_chunks(self) -> Iterator[GenerateResponse]:
        """Nothing: the last cumulative chunk was the whole answer."""
        return iter(())

    def _answer(self, index: int) -> GenerateResponse:
        state = self._states[index]
        with_logprobs = self.body.return_logprob
        return GenerateResponse(
            text=state.text,
            output_ids=state.ids,
            meta_info=GenerateMeta(
                id=self.client_id if self.is_single else f"{self.client_id}-{index}",
                finish_reason=state.finish,
                prompt_tokens=len(self.plan.prompts[index // self.plan.n].ids),
                completion_tokens=len(state.ids),
                cached_tokens=state.cached_tokens,
                output_token_logprobs=[(finite(one.logprob), one.token_id, None) for one in state.logprobs]
                if with_logprobs
                else None,
                output_top_logprobs=[
                    [(finite(value), token, None) for token, value in one.top] for one in state.logprobs
                ]
                if with_logprobs and self.body.top_logprobs_num
                else None,
            ),
            index=None if self.is_single else index,
        )
