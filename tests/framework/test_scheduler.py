"""The scheduler: continuous batching, chunks, preemption, prefix cache, aborts; driven by a paper model that checks every page."""

from __future__ import annotations

import attrs
import pytest
from crossdock.errors import ConfigValueError, MisuseError, OverloadedError, RequestError
from crossdock.kv_cache import BlockPool
from crossdock.scheduled import SchedulerLimits
from crossdock.scheduler import Scheduler
from crossdock.testing.paper_engine import PaperEngine, next_token, request
from crossdock.types.step import ForwardMode
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 50


def engine(
    *,
    pages: int = 64,
    page_tokens: int = 4,
    running: int = 8,
    step_tokens: int = 32,
    chunk: int = 16,
    context: int = 1000,
    queue: int = 100,
    keep_prefixes: bool = True,
    eos: tuple[int, ...] = (),
    depth: int = 0,
) -> PaperEngine:
    limits = SchedulerLimits(
        max_running_requests=running,
        max_step_tokens=step_tokens,
        chunk_tokens=chunk,
        max_sequence_tokens=context,
        max_queued_requests=queue,
    )
    pool = BlockPool(pages, page_tokens, seed=1, keep_prefixes=keep_prefixes)
    return PaperEngine(Scheduler(limits, pool, eos, depth=depth), VOCAB)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def assert_pool_is_empty(paper: PaperEngine) -> None:
    pool = paper.scheduler.pool
    assert pool.usage().held == 0
    pool.flush()
    assert pool.usage().free == pool.usable_pages


def test_one_request_gets_its_tokens_and_ends_with_length() -> None:
    paper = engine()
    paper.scheduler.add(request("a", [1, 2, 3], 5))
    paper.run()
    assert paper.tokens_of("a") == expected_tokens([1, 2, 3], 5)
    assert [output.finish_reason for output in paper.outputs["a"]] == [None] * 4 + ["length"]
    assert paper.outputs["a"][0].prompt_tokens == 3
    assert_pool_is_empty(paper)


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8),
    counts=st.lists(st.integers(0, 20), min_size=8, max_size=8),
    pages=st.integers(14, 40),
    page_tokens=st.integers(1, 5),
    running=st.integers(1, 6),
    extra=st.integers(0, 20),
    chunk=st.integers(1, 20),
    keep_prefixes=st.booleans(),
    depth=st.integers(0, 1),
)
def test_tokens_never_depend_on_limits_neighbours_preemption_or_prefix_cache(
    prompts: list[list[int]],
    counts: list[int],
    pages: int,
    page_tokens: int,
    running: int,
    extra: int,
    chunk: int,
    keep_prefixes: bool,
    depth: int,
) -> None:
    paper = engine(
        pages=pages * 5 // page_tokens,
        page_tokens=page_tokens,
        running=running,
        step_tokens=running + extra,
        chunk=chunk,
        keep_prefixes=keep_prefixes,
        depth=depth,
    )
    for index, prompt in enumerate(prompts):
        paper.scheduler.add(request(str(index), prompt, counts[index]))
    paper.run()
    for index, prompt in enumerate(prompts):
        assert paper.tokens_of(str(index)) == expected_tokens(prompt, counts[index])
    for scheduled in paper.steps:
        assert scheduled.work.num_tokens <= running + extra
        assert len(scheduled.sequences) <= running
    assert_pool_is_empty(paper)


def test_preemption_by_recompute_gives_the_tokens_of_an_undisturbed_run() -> None:
    paper = engine(pages=9, page_tokens=2, keep_prefixes=False)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8]}
    for rid, prompt in prompts.items():
        paper.scheduler.add(request(rid, prompt, 10))
    paper.run()
    assert paper.scheduler.num_preemptions > 0
    for rid, prompt in prompts.items():
        assert paper.tokens_of(rid) == expected_tokens(prompt, 10)
    assert_pool_is_empty(paper)


def test_the_last_to_come_is_preempted_and_the_first_never() -> None:
    paper = engine(pages=9, page_tokens=2, keep_prefixes=False)
    for rid in ("first", "second", "third"):
        paper.scheduler.add(request(rid, [1, 2, 3], 10))
    paper.run()
    preemptions = {sequence.rid: sequence.preemptions for step in paper.steps for sequence in step.sequences}
    assert preemptions["first"] == 0
    assert preemptions["third"] >= preemptions["second"] > 0
    assert all(len(paper.tokens_of(rid)) == 10 for rid in preemptions)


def test_a_long_prompt_is_cut_into_chunks_and_never_starves_generating_requests() -> None:
    paper = engine(step_tokens=10, chunk=8, pages=100)
    paper.scheduler.add(request("short", [1, 2], 30))
    paper.step()
    paper.scheduler.add(request("long", list(range(40)), 2))
    while not paper.outputs.get("long"):
        scheduled = paper.step()
        assert "short" in [sequence.rid for sequence in scheduled.sequences]
        assert scheduled.work.forward_mode is ForwardMode.MIXED
        assert max(len(rows.tokens) for rows in scheduled.work.sequences) <= 8
    paper.run()
    assert paper.tokens_of("long") == expected_tokens(list(range(40)), 2)
    assert paper.tokens_of("short") == expected_tokens([1, 2], 30)


def test_a_short_prompt_gets_past_a_long_one_that_is_in_chunks() -> None:
    paper = engine(step_tokens=12, chunk=8, pages=100)
    paper.scheduler.add(request("long", list(range(60)), 1))
    paper.step()
    paper.scheduler.add(request("short", [1, 2, 3], 1))
    paper.step()
    assert paper.outputs["short"][-1].finish_reason == "length"
    assert "long" not in paper.outputs


def test_a_repeated_prompt_takes_its_full_pages_from_the_cache_but_computes_at_least_one_token() -> None:
    paper = engine(page_tokens=4)
    prompt = list(range(8))
    for rid in ("cold", "warm"):
        paper.scheduler.add(request(rid, prompt, 2))
        paper.run()
    assert paper.outputs["cold"][0].cached_tokens == 0
    assert paper.outputs["warm"][0].cached_tokens == 4
    assert paper.tokens_of("warm") == paper.tokens_of("cold") == expected_tokens(prompt, 2)


def test_generated_tokens_are_found_again_as_the_prompt_of_the_next_turn() -> None:
    paper = engine(page_tokens=4)
    paper.scheduler.add(request("turn1", [1, 2, 3], 10))
    paper.run()
    prompt = [1, 2, 3, *paper.tokens_of("turn1"), 9]
    paper.scheduler.add(request("turn2", prompt, 1))
    paper.run()
    assert paper.outputs["turn2"][0].cached_tokens == 12


def test_prompt_logprobs_come_once_complete_and_in_order_whatever_the_chunks() -> None:
    paper = engine(step_tokens=8, chunk=3, page_tokens=2, running=2, pages=40)
    paper.scheduler.add(request("warm", list(range(10)), 1))
    paper.run()
    paper.scheduler.add(request("scored", list(range(10)), 2, prompt_logprobs=0))
    paper.run()
    first, second = paper.outputs["scored"]
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *range(1, 10)]
    assert second.prompt_logprobs == ()
    assert first.cached_tokens == 0


def test_max_new_tokens_zero_scores_the_prompt_and_generates_nothing() -> None:
    paper = engine(chunk=4)
    paper.scheduler.add(request("score", list(range(10)), 0, prompt_logprobs=0))
    paper.scheduler.add(request("nothing", [1], 0))
    paper.run()
    assert paper.tokens_of("score") == []
    assert [output.finish_reason for output in paper.outputs["score"]] == ["length"]
    assert len(paper.outputs["score"][0].prompt_logprobs) == 10
    assert [output.finish_reason for output in paper.outputs["nothing"]] == ["length"]
    assert_pool_is_empty(paper)


def test_a_preempted_request_with_prompt_logprobs_gets_each_of_them_once() -> None:
    paper = engine(pages=11, page_tokens=2, step_tokens=6, chunk=3, running=3, keep_prefixes=True)
    for rid in ("a", "b", "c"):
        paper.scheduler.add(request(rid, [1, 2, 3, 4, 5], 8, prompt_logprobs=0))
    paper.run()
    assert paper.scheduler.num_preemptions > 0
    for rid in ("a", "b", "c"):
        entries = [entry for output in paper.outputs[rid] for entry in output.prompt_logprobs]
        assert [entry and entry.token_id for entry in entries] == [None, 1, 2, 3, 4]
        assert paper.tokens_of(rid) == expected_tokens([1, 2, 3, 4, 5], 8)


@pytest.mark.parametrize(
    ("options", "reason", "length"),
    [
        ({}, "stop", 1),
        ({"ignore_eos": True}, "length", 6),
        ({"min_new_tokens": 3}, "length", 6),
    ],
)
def test_eos_ends_a_request_unless_it_is_ignored_or_too_early(
    options: dict[str, object], reason: str, length: int
) -> None:
    first = expected_tokens([1, 2], 1)[0]
    paper = engine(eos=(first,))
    assert first not in expected_tokens([1, 2], 6)[1:]
    paper.scheduler.add(request("a", [1, 2], 6, **options))
    paper.run()
    assert paper.outputs["a"][-1].finish_reason == reason
    assert len(paper.tokens_of("a")) == length


def test_a_stop_token_of_the_request_ends_it_and_is_its_last_token() -> None:
    tokens = expected_tokens([1, 2], 4)
    paper = engine()
    paper.scheduler.add(request("a", [1, 2], 9, stop_token_ids=(tokens[2],)))
    paper.run()
    assert paper.tokens_of("a") == tokens[: tokens.index(tokens[2]) + 1]
    assert paper.outputs["a"][-1].finish_reason == "stop"


def test_the_context_limit_ends_a_request_with_length() -> None:
    paper = engine(context=10)
    paper.scheduler.add(request("a", [1] * 8, 50))
    paper.run()
    assert len(paper.tokens_of("a")) == 2
    assert paper.outputs["a"][-1].finish_reason == "length"


def test_a_request_that_fills_the_whole_cache_ends_with_length_and_leaves_nothing() -> None:
    paper = engine(pages=5, page_tokens=2)
    paper.scheduler.add(request("a", [1] * 3, 50))
    paper.run()
    assert len(paper.tokens_of("a")) == 6
    assert paper.outputs["a"][-1].finish_reason == "length"
    assert_pool_is_empty(paper)


@pytest.mark.parametrize("moment", ["waiting", "mid_prefill", "running", "in_flight", "after_preemption"])
def test_an_abort_at_any_moment_leaves_the_pool_empty_and_the_others_undisturbed(moment: str) -> None:
    paper = engine(pages=9 if moment == "after_preemption" else 60, page_tokens=2, chunk=4, step_tokens=8)
    scheduler = paper.scheduler
    scheduler.add(request("other", [1, 2, 3], 10))
    prompt = [5, 6, 7] if moment == "after_preemption" else list(range(12))
    scheduler.add(request("gone", prompt, 10))
    if moment == "mid_prefill":
        paper.step()
    elif moment == "running":
        while not paper.outputs.get("gone"):
            paper.step()
    elif moment == "after_preemption":
        while not scheduler.num_preemptions:
            paper.step()
    elif moment == "in_flight":
        scheduled = scheduler.schedule()
        output = scheduler.abort("gone")
        assert output is not None and output.finish_reason == "abort"
        held = scheduler.pool.usage().held
        paper.finish(scheduled)
        assert scheduler.pool.usage().held < held
    if moment != "in_flight":
        output = scheduler.abort("gone")
        assert output is not None and output.finish_reason == "abort"
    assert scheduler.abort("gone") is None
    paper.run()
    assert paper.tokens_of("other") == expected_tokens([1, 2, 3], 10)
    assert_pool_is_empty(paper)


def test_a_step_whose_requests_are_all_aborted_completes_without_outputs() -> None:
    paper = engine()
    for rid in ("a", "b"):
        paper.scheduler.add(request(rid, [1, 2], 3))
    scheduled = paper.scheduler.schedule()
    for rid in ("a", "b"):
        paper.scheduler.abort(rid)
    paper.finish(scheduled)
    assert paper.outputs == {}
    assert not paper.scheduler.has_work
    assert paper.scheduler.schedule().work.forward_mode is ForwardMode.IDLE
    assert_pool_is_empty(paper)


def test_a_full_queue_refuses_but_not_health_probes() -> None:
    paper = engine(queue=2)
    for rid in ("a", "b"):
        paper.scheduler.add(request(rid, [1], 1))
    with pytest.raises(OverloadedError, match="2 requests wait"):
        paper.scheduler.add(request("c", [1], 1))
    probe = request("probe", [1], 1)
    paper.scheduler.add(type(probe)(rid="probe", prompt_ids=(1,), sampling=probe.sampling, is_health_check=True))
    paper.run()
    assert set(paper.outputs) == {"a", "b", "probe"}


def test_health_probes_are_no_load_and_a_step_of_probes_alone_says_so() -> None:
    paper = engine()
    plain = request("plain", [1, 2, 3], 2)
    probe = type(plain)(rid="probe", prompt_ids=(1, 2), sampling=plain.sampling, is_health_check=True)
    paper.scheduler.add(probe)
    assert paper.scheduler.load(0, 0).waiting == 0
    assert paper.step().is_health_check
    load = paper.scheduler.load(0, 1)
    assert (load.running, load.tokens, load.attention_pairs) == (0, 0, 0)
    paper.scheduler.add(plain)
    load = paper.scheduler.load(0, 1)
    assert (load.waiting, load.tokens, load.attention_pairs) == (1, 3, 6)
    assert not paper.step().is_health_check


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([], 1, "prompt is empty"),
        ([1] * 64, 1, "has 64 tokens and needs 65, but the context holds 64"),
        ([1] * 65, 0, "has 65 tokens"),
        ([1], -1, "max_new_tokens must be at least 0, found -1"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(prompt: list[int], count: int, words: str) -> None:
    paper = engine(context=64)
    with pytest.raises(RequestError, match=words):
        paper.scheduler.add(request("a", prompt, count))
    assert not paper.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([1, 50], {}, "prompt: token id 50 is outside the vocabulary"),
        ([-1], {}, "prompt: token id -1 is outside"),
        ([1], {"logit_bias": ((99, 1.0),)}, "logit_bias: token id 99 is outside"),
        ([1], {"stop_token_ids": (3, 70)}, "stop_token_ids: token id 70 is outside"),
        ([1], {"logprobs": -1}, "logprobs must be at least 0, found -1"),
        ([1], {"prompt_logprobs": -2}, "prompt_logprobs must be at least 0, found -2"),
    ],
)
def test_values_that_would_break_a_step_are_refused(prompt: list[int], options: dict[str, object], words: str) -> None:
    scheduler = engine().scheduler
    scheduler.limits = attrs.evolve(scheduler.limits, vocab_size=VOCAB)
    with pytest.raises(RequestError, match=words):
        scheduler.add(request("a", prompt, 1, **options))
    scheduler.add(request("b", [0, VOCAB - 1], 1, logit_bias=((VOCAB - 1, 1.0),)))


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    paper = engine(pages=5, page_tokens=2)
    with pytest.raises(RequestError, match="needs 9, but the KV cache of a replica holds 8"):
        paper.scheduler.add(request("a", [1] * 8, 1))


def test_a_request_id_in_use_is_refused() -> None:
    paper = engine()
    paper.scheduler.add(request("a", [1], 1))
    with pytest.raises(RequestError, match="already running"):
        paper.scheduler.add(request("a", [2], 1))


def test_smaller_priority_numbers_go_first() -> None:
    paper = engine(running=1, step_tokens=1)
    plain = request("late", [1], 1)
    paper.scheduler.add(request("early", [1], 1))
    paper.scheduler.add(type(plain)(rid="urgent", prompt_ids=(2,), sampling=plain.sampling, priority=-1))
    paper.run()
    assert list(paper.outputs) == ["urgent", "early"]


def test_the_step_record_counts_rows_logits_pairs_and_modes_as_the_facts_say() -> None:
    paper = engine(chunk=4, step_tokens=8)
    paper.scheduler.add(request("a", [1, 2], 5))
    paper.step()
    paper.scheduler.add(request("b", [1] * 6, 5, prompt_logprobs=0))
    scheduled = paper.scheduler.schedule()
    record = scheduled.work.record(step=3, eplb_pass=1, has_work=True, is_health_check=False)
    paper.finish(scheduled)
    assert (record.num_tokens, record.num_tokens_for_logprob) == (1 + 4, 1 + 4)
    assert (record.is_prefill_in_batch, record.local_forward_mode) == (1, 3)
    assert record.attention_pairs == 3 + (1 + 2 + 3 + 4)
    assert (record.step, record.eplb_pass, record.has_work) == (3, 1, 1)
    assert record.prefill_graph_vote == 0, "logits of a prompt's rows are wanted"
    idle = engine().scheduler.schedule().work.record(step=0, eplb_pass=0, has_work=False, is_health_check=False)
    assert (idle.num_tokens, idle.num_tokens_for_logprob, idle.local_forward_mode, idle.has_work) == (0, 0, 4, 0)
    assert idle.prefill_graph_vote == 1


def test_two_steps_at_once_and_a_foreign_step_are_misuse() -> None:
    paper = engine()
    scheduled = paper.scheduler.schedule()
    with pytest.raises(MisuseError, match="not complete"):
        paper.scheduler.schedule()
    paper.finish(scheduled)
    with pytest.raises(MisuseError, match="not the one in flight"):
        paper.finish(scheduled)


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigValueError, match="max_running_requests = 9"):
        engine(running=9, step_tokens=8)
    with pytest.raises(ConfigValueError, match="chunk_tokens = 0"):
        engine(chunk=0)
