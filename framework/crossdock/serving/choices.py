"""Engine outputs to choices: text without half characters or stop strings, log-probabilities, the reason of the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import attrs

from crossdock.errors import CrossdockError, OverloadedError, RequestError, RuntimeFault
from crossdock.serving.detokenizer import Detokenizer, make_detokenizer
from crossdock.serving.engine_client import EngineClient
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.protocol.responses import FinishReason
from crossdock.serving.stop_strings import StopMatcher
from crossdock.serving.tokenizer import TextTokenizer
from crossdock.types.request import EngineOutput, TokenLogprob

_FINISH_REASONS: dict[str | None, FinishReason | None] = {
    None: None,
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@attrs.frozen(kw_only=True)
class ChoiceDelta:
    """What one engine output adds to one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id out of ``stop_token_ids``, that ended it."""
    cached_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0


@attrs.define(kw_only=True, eq=False)
class Choice:
    """One sequence on its way to text."""

    index: int
    rid: str
    stop_token_ids: tuple[int, ...]
    min_new_tokens: int
    include_stop: bool
    detokenizer: Detokenizer
    matcher: StopMatcher
    num_tokens: int = 0
    is_finished: bool = False

    def take(self, output: EngineOutput) -> ChoiceDelta:
        """The delta of an output. ``is_finished`` may become true before the engine's own end, by a stop string."""
        token_ids = output.token_ids
        self.num_tokens += len(token_ids)
        stop_reason: str | int | None = None
        visible = token_ids
        if output.finish_reason == "stop" and token_ids and not self.include_stop:
            # The engine ends with "stop" on its last token only: end of text or a stop id, which are no text.
            visible = token_ids[:-1]
        if output.finish_reason == "stop" and token_ids and token_ids[-1] in self.stop_token_ids:
            stop_reason = token_ids[-1]
        text = self.detokenizer.feed(visible)
        if output.finish_reason is not None:
            text += self.detokenizer.flush()
        finish_reason = _FINISH_REASONS[output.finish_reason]
        if self.num_tokens >= self.min_new_tokens:
            checked = self.matcher.feed(text)
            text = checked.text
            if checked.stop is not None:
                finish_reason, stop_reason = "stop", checked.stop
        if finish_reason is not None:
            text += self.matcher.flush()
            self.is_finished = True
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=output.cached_tokens,
            queued_s=output.queued_s,
            prefill_s=output.prefill_s,
        )


@attrs.define(kw_only=True, eq=False)
class _Mailbox:
    """Outputs for the one task that reads them. A queue wakes its reader for each output and costs twice as much a token."""

    _arrived: list[EngineOutput] = attrs.field(factory=list["EngineOutput"], init=False)
    _waiting: asyncio.Future[None] | None = attrs.field(default=None, init=False)

    def put(self, output: EngineOutput) -> None:
        self._arrived.append(output)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[EngineOutput]:
        """Everything that has come, at least one: a slow client gets fewer, larger chunks."""
        if not self._arrived:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
            self._waiting = None
        arrived, self._arrived = self._arrived, []
        return arrived


async def choice_deltas(
    plan: GenerationPlan, engine: EngineClient, tokenizer: TextTokenizer | None
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Deltas of all choices of a request as they come, in batches of what has arrived, until each choice has finished.

    Leaving the iteration early, by an error or because the client hung up, aborts what still runs.

    Raises:
        OverloadedError: the request was not taken.
        RequestError: the engine refuses it.
        RuntimeFault: the engine failed.
    """
    choices = {plan.rid(index): _choice(plan, index, tokenizer) for index in range(plan.num_choices)}
    mailbox = _Mailbox()
    try:
        requests = [plan.engine_request(index) for index in range(plan.num_choices)]
        await engine.submit(requests, mailbox.put, pinned=plan.routed_dp_rank)
        running = set(choices)
        while running:
            batch: list[ChoiceDelta] = []
            stopped: list[str] = []
            for output in await mailbox.take():
                choice = choices[output.rid]
                if choice.is_finished:
                    continue
                if output.finish_reason == "error":
                    raise engine_error(output.error or "the engine ended the sequence without a reason", engine)
                batch.append(choice.take(output))
                if choice.is_finished:
                    running.discard(output.rid)
                    if output.finish_reason is None:
                        stopped.append(output.rid)
            if stopped:
                await engine.abort(stopped)
            if batch:
                yield batch
    finally:
        unfinished = [rid for rid, choice in choices.items() if not choice.is_finished]
        if unfinished:
            # Shielded: the client's hanging up cancels this task, and the abort must still go out.
            await asyncio.shield(engine.abort(unfinished))


def engine_error(message: str, engine: EngineClient) -> CrossdockError:
    """The error for a sequence that the engine ended: 503 when the engine is gone, else what its message says."""
    if engine.failure is not None:
        return RuntimeFault(message)
    if "try again later" in message:
        return OverloadedError(message)
    return RequestError(message)


def _choice(plan: GenerationPlan, index: int, tokenizer: TextTokenizer | None) -> Choice:
    sampling = plan.sampling[index // plan.n]
    return Choice(
        index=index,
        rid=plan.rid(index),
        stop_token_ids=sampling.stop_token_ids,
        min_new_tokens=sampling.min_new_tokens,
        include_stop=plan.include_stop,
        detokenizer=make_detokenizer(tokenizer, skip_special_tokens=plan.skip_special_tokens),
        matcher=StopMatcher(stops=plan.stops, include_stop=plan.include_stop),
    )
