"""From a step's logit rows to tokens: the right row for each sequence, log-probabilities of the right prompt tokens."""

from __future__ import annotations

import torch
from crossdock.choose_tokens import choose, sampling_row
from crossdock.kv_cache import BlockPool
from crossdock.sampler import SamplingRow
from crossdock.scheduled import Scheduled, SchedulerLimits, StepTokens
from crossdock.scheduler import Scheduler
from crossdock.testing.paper_engine import request

VOCAB = 20
EOS = frozenset({3})


def scheduler(chunk: int = 100) -> Scheduler:
    limits = SchedulerLimits(max_running_requests=8, max_step_tokens=64, chunk_tokens=chunk, max_sequence_tokens=100)
    return Scheduler(limits, BlockPool(50, 4, seed=1), EOS)


def sampling_rows(scheduled: Scheduled) -> list[SamplingRow]:
    pairs = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
    return [sampling_row(sequence, rows, EOS) for sequence, rows in pairs]


def logits_for(scheduled: Scheduled) -> torch.Tensor:
    return torch.randn(scheduled.work.num_logit_rows, VOCAB, generator=torch.Generator().manual_seed(1))


def test_each_sequence_samples_from_its_last_row() -> None:
    running = scheduler()
    running.add(request("plain", [1, 2, 3], 4))
    running.add(request("scored", [4, 5, 6, 7], 4, prompt_logprobs=2))
    running.add(request("only_scored", [8, 9], 0, prompt_logprobs=0))
    scheduled = running.schedule()
    logits = logits_for(scheduled)
    assert logits.shape[0] == 1 + 4 + 2
    tokens = choose(logits, scheduled, EOS).read()
    assert tokens.token_ids == (int(logits[0].argmax()), int(logits[4].argmax()))
    assert tokens.logprobs == ()
    scores = torch.log_softmax(logits, dim=-1)
    plain, scored, only_scored = tokens.prompt_logprobs
    assert plain == ()
    assert [entry.token_id for entry in scored] == [5, 6, 7]
    for row, entry in enumerate(scored, start=1):
        assert abs(entry.logprob - float(scores[row, entry.token_id])) < 1e-6
        assert len(entry.top) == 2
    assert [(entry.token_id, entry.top) for entry in only_scored] == [(9, ())]
    assert abs(only_scored[0].logprob - float(scores[5, 9])) < 1e-6


def test_a_middle_chunk_scores_the_token_after_it_and_samples_nothing() -> None:
    running = scheduler(chunk=2)
    running.add(request("scored", [4, 5, 6, 7], 4, prompt_logprobs=0))
    scheduled = running.schedule()
    logits = logits_for(scheduled)
    choice = choose(logits, scheduled, EOS)
    tokens = choice.read()
    assert choice.ids.shape == (0,)
    assert tokens.token_ids == ()
    assert [entry.token_id for entry in tokens.prompt_logprobs[0]] == [5, 6]


def test_logprobs_come_only_for_sequences_that_asked() -> None:
    running = scheduler()
    running.add(request("without", [1], 4))
    running.add(request("with", [2], 4, logprobs=1))
    scheduled = running.schedule()
    logits = logits_for(scheduled)
    tokens = choose(logits, scheduled, EOS).read()
    first, second = tokens.logprobs
    assert first is None
    assert second is not None
    assert (second.token_id, len(second.top), second.rank) == (int(logits[1].argmax()), 1, 0)


def test_ends_are_forbidden_until_the_minimum_is_generated() -> None:
    running = scheduler()
    running.add(request("a", [1, 2], 9, min_new_tokens=2, stop_token_ids=(7,)))
    running.add(request("b", [1, 2], 9, min_new_tokens=2, ignore_eos=True))
    first, second = sampling_rows(running.schedule())
    assert set(first.forbidden) == {7, 3}
    assert second.forbidden == ()


def test_ends_are_allowed_again_after_the_minimum_and_the_position_is_that_of_the_new_token() -> None:
    running = scheduler()
    running.add(request("a", [1, 2], 9, min_new_tokens=2, stop_token_ids=(7,)))
    for forbidden, position in (({7, 3}, 2), ({7, 3}, 3), (set[int](), 4)):
        scheduled = running.schedule()
        (row,) = sampling_rows(scheduled)
        assert (set(row.forbidden), row.position) == (forbidden, position)
        running.complete(scheduled, StepTokens(token_ids=(5,)))


def test_history_goes_to_the_sampler_only_for_penalties() -> None:
    running = scheduler()
    running.add(request("a", [1, 2], 9, repetition_penalty=1.2))
    running.add(request("b", [1, 2], 9))
    running.complete(running.schedule(), StepTokens(token_ids=(5, 6)))
    first, second = sampling_rows(running.schedule())
    assert (first.prompt, first.generated) == ((1, 2), (5,))
    assert (second.prompt, second.generated) == ((), ())


def test_what_was_asked_for_is_read_after_the_logits_were_overwritten() -> None:
    running = scheduler()
    running.add(request("best", [1], 4, logprobs=2))
    running.add(request("scored", [2, 3], 4, prompt_logprobs=0))
    running.add(request("drawn", [4], 4, temperature=0.7, seed=5))
    scheduled = running.schedule()
    logits = logits_for(scheduled)
    want = choose(logits.clone(), scheduled, EOS).read()
    choice = choose(logits, scheduled, EOS)
    logits.zero_()
    assert choice.read() == want
