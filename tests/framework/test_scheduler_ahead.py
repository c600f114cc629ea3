"""Depth 1 of the scheduler: steps scheduled while one is in flight, against the same requests one step at a time."""

from __future__ import annotations

import random

import pytest
from crossdock.kv_cache import BlockPool
from crossdock.scheduled import SchedulerLimits
from crossdock.scheduler import Scheduler
from crossdock.testing.paper_engine import PaperEngine, next_token, request
from crossdock.types.request import EngineRequest

VOCAB = 50


def engine(
    depth: int,
    *,
    pages: int = 64,
    page_tokens: int = 4,
    running: int = 8,
    step_tokens: int = 32,
    chunk: int = 16,
    eos: tuple[int, ...] = (),
) -> PaperEngine:
    limits = SchedulerLimits(
        max_running_requests=running, max_step_tokens=step_tokens, chunk_tokens=chunk, max_sequence_tokens=1000
    )
    return PaperEngine(Scheduler(limits, BlockPool(pages, page_tokens, seed=1), eos, depth=depth), VOCAB)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


class Mix:
    """Requests of all kinds that arrive, stop and are aborted at fixed steps; the same for each depth."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.pages, self.page_tokens = draw.randint(24, 60), draw.randint(1, 4)
        self.eos = (draw.randrange(VOCAB),)
        self.arrivals = sorted(draw.randrange(25) for _ in range(12))
        self.aborts = {str(number): draw.randrange(10, 60) for number in draw.sample(range(12), 3)}
        self.requests = [self._request(str(number), draw) for number in range(12)]

    @staticmethod
    def _request(rid: str, draw: random.Random) -> EngineRequest:
        options: dict[str, object] = {"stop_token_ids": (draw.randrange(VOCAB), draw.randrange(VOCAB))}
        if draw.random() < 0.3:
            options["min_new_tokens"] = draw.randint(1, 5)
        if draw.random() < 0.3:
            options["ignore_eos"] = True
        if draw.random() < 0.2:
            options["prompt_logprobs"] = 0
        if draw.random() < 0.2:
            options["presence_penalty"] = 0.5
        return request(rid, [draw.randrange(3) for _ in range(draw.randint(1, 20))], draw.randint(0, 20), **options)

    def run(self, depth: int) -> PaperEngine:
        paper = engine(
            pages=self.pages,
            page_tokens=self.page_tokens,
            running=5,
            step_tokens=12,
            chunk=5,
            eos=self.eos,
            depth=depth,
        )
        number = 0
        for step in range(60):
            while number < len(self.arrivals) and self.arrivals[number] <= step:
                paper.scheduler.add(self.requests[number])
                number += 1
            for rid, at in self.aborts.items():
                output = paper.scheduler.abort(rid) if at == step else None
                if output is not None:
                    paper.outputs.setdefault(rid, []).append(output)
            paper.step()
        paper.run()
        return paper


@pytest.mark.parametrize("seed", range(40))
def test_a_step_scheduled_while_one_is_in_flight_changes_no_token_and_no_reason(seed: int) -> None:
    mix = Mix(seed)
    plain, ahead = mix.run(0), mix.run(1)
    assert ahead.scheduler.pool.usage().held == 0
    assert set(plain.outputs) == set(ahead.outputs)
    for rid, outputs in plain.outputs.items():
        got = ahead.outputs[rid]
        scored = [[entry and entry.token_id for entry in output.prompt_logprobs] for output in (outputs[0], got[0])]
        if "abort" in (outputs[-1].finish_reason, got[-1].finish_reason):
            # The same request, seen at another moment: one run's tokens begin the other's.
            short, long = sorted((plain.tokens_of(rid), ahead.tokens_of(rid)), key=len)
            assert long[: len(short)] == short
            continue
        assert plain.tokens_of(rid) == ahead.tokens_of(rid), rid
        assert outputs[-1].finish_reason == got[-1].finish_reason
        assert scored[0] == scored[1]


def test_a_stop_is_seen_one_step_late_and_the_extra_row_is_dropped() -> None:
    tokens = expected_tokens([1, 2], 4)
    paper = engine(1)
    paper.scheduler.add(request("a", [1, 2], 9, stop_token_ids=(tokens[2],)))
    last = tokens.index(tokens[2])
    for _ in range(last + 1):
        paper.step()
    assert paper.tokens_of("a") == tokens[:last], "the step with the stop is in flight"
    extra = paper.step()
    assert (paper.tokens_of("a"), extra.work.num_tokens) == (tokens[: last + 1], 1)
    assert paper.scheduler.pool.usage().held > 0, "the extra row still writes to its page"
    paper.step()
    assert paper.tokens_of("a") == tokens[: last + 1]
    assert paper.scheduler.pool.usage().held == 0


def test_a_last_token_that_is_known_to_be_the_last_costs_no_extra_row() -> None:
    counts = [0, 0]
    for depth in (0, 1):
        paper = engine(depth)
        paper.scheduler.add(request("a", [1, 2], 5))
        paper.run()
        counts[depth] = sum(scheduled.work.num_tokens for scheduled in paper.steps)
    assert counts == [6, 6]


def test_a_generating_row_names_the_place_of_its_token_among_the_ids_of_the_step_before() -> None:
    paper = engine(1, chunk=4)
    for rid, prompt in {"a": [1], "b": [2] * 6, "c": [3, 4]}.items():
        paper.scheduler.add(request(rid, prompt, 9))
    assert [rows.samples for rows in paper.step().work.sequences] == [True, False, True]
    second = paper.step().work.sequences
    assert [(rows.tokens, rows.source) for rows in second] == [((-1,), 0), ((2, 2), -1), ((-1,), 1)]
    third = paper.step().work.sequences
    assert [(rows.tokens, rows.source) for rows in third] == [((-1,), 0), ((-1,), 1), ((-1,), 2)]


def test_penalties_need_the_tokens_before_so_their_steps_wait() -> None:
    paper = engine(1)
    paper.scheduler.add(request("plain", [1], 9))
    assert not paper.scheduler.needs_tokens
    paper.scheduler.add(request("a", [1], 3, frequency_penalty=0.1))
    assert paper.scheduler.needs_tokens
    for _ in range(4):
        work = paper.step().work
        assert all(rows.source == -1 for rows in work.sequences)
    assert not paper.scheduler.needs_tokens
