"""The step loop on ranks that are threads of this process, with a frontend beside it: parking, idle replicas, aborts, verbs, stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import structlog
from crossdock.config import Config, RecorderConfig
from crossdock.config_rules import parallel_sizes
from crossdock.engine import RankEngine
from crossdock.engine_build import build_engine
from crossdock.errors import AgreementError, RankLost
from crossdock.observe.trace_files import read_trace
from crossdock.offline import generate, new_tokens
from crossdock.offline_link import OfflineLink
from crossdock.rank_plan import plan_rank
from crossdock.testing.fake_frontend import FakeFrontend, cpu_share
from crossdock.testing.paper_engine import request
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.testing.world import OneProcessWorld, RankContext, RankFailure
from crossdock.types.link import ControlReply
from crossdock.types.request import SamplingParams

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


class RunningEngine:
    """Ranks as threads; ``engines`` holds them by rank once they are built."""

    def __init__(self, config: Config) -> None:
        self.config = config
        sizes = parallel_sizes(config.parallel)
        self.frontend = FakeFrontend(sizes)
        self.engines: dict[int, RankEngine] = {}
        self.prepare: Callable[[RankEngine], None] = lambda engine: None
        self._world = OneProcessWorld(sizes)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.frontend.stop()
        self._thread.join(30)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), "the ranks did not leave together"

    def _run(self) -> None:
        try:
            self._world.run(self._rank, timeout_s=60)
        except BaseException as error:
            self._error = error
        self.frontend.end()

    def _rank(self, context: RankContext) -> None:
        plan = plan_rank(self.config, context.rank)
        link = self.frontend.links[context.rank]
        with build_engine(plan, context.comms_of(plan.sizes), link) as engine:
            self.engines[context.rank] = engine
            self.prepare(engine)
            engine.run()


def running(folder: Path, attn_dp: int = 2, **scheduler: int | str) -> RunningEngine:
    config = random_model_config(folder, ranks=attn_dp, attn_dp=attn_dp, dispatcher="alltoallv", **scheduler)
    return RunningEngine(config)


def alone(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the prompt in an engine of its own on one rank."""
    params = attrs.evolve(GREEDY, max_new_tokens=count)
    return new_tokens(generate(folder, [prompt], params, random_model_config(folder))[0])


def test_a_request_on_one_replica_is_served_while_the_other_runs_idle_batches(folder: Path) -> None:
    with running(folder) as engine:
        engine.frontend.submit(0, request("a", [1, 2, 3], 6))
        engine.frontend.wait_finished("a")
        engine.frontend.wait_parked()
    assert engine.frontend.tokens("a") == alone(folder, [1, 2, 3], 6)
    counts = [engine.engines[rank].counters.forward for rank in (0, 1)]
    assert counts[0] == counts[1], "the idle replica ran every step"
    assert sum(counts[0].values()) == 6


@pytest.mark.parametrize(("is_dense", "depth"), [(False, "0"), (True, "0"), (False, "1")])
def test_seven_requests_here_and_three_there_all_finish_then_everybody_parks_without_using_the_cpu(
    folder: Path, tmp_path: Path, is_dense: bool, depth: str
) -> None:
    if is_dense:
        folder = write_random_model(tmp_path, num_hidden_layers=2, mlp_only_layers=[0, 1])
    prompts = {f"a{n}": [n + 1] * (n + 1) for n in range(7)} | {f"b{n}": [n + 20, 3] for n in range(3)}
    with running(folder, depth=depth, max_running_requests=4, max_step_tokens=8, chunk_tokens=4) as engine:
        for rid, prompt in prompts.items():
            engine.frontend.submit(0 if rid.startswith("a") else 1, request(rid, prompt, 5))
        engine.frontend.wait_finished(*prompts)
        engine.frontend.wait_parked()
        assert cpu_share(0.5) < 0.05
        for rid, prompt in prompts.items():
            assert engine.frontend.tokens(rid) == alone(folder, prompt, 5), rid
        for one in engine.engines.values():
            assert one.scheduler is not None
            assert one.scheduler.pool.usage().held == 0


def test_parked_ranks_wake_together_again_and_again_and_step_numbers_go_on(folder: Path) -> None:
    with running(folder) as engine:
        for turn in range(5):
            engine.frontend.wait_parked()
            rid = f"turn{turn}"
            engine.frontend.submit(turn % 2, request(rid, [5, 6, turn], 2))
            engine.frontend.wait_finished(rid)
        engine.frontend.wait_parked()
    steps = sorted({park.step for park in engine.frontend.parks})
    assert len(steps) == 6
    assert steps == sorted(steps)
    assert [engine.frontend.finish_reason(f"turn{turn}") for turn in range(5)] == ["length"] * 5


def test_a_request_that_comes_while_the_ranks_are_parking_is_not_lost(folder: Path) -> None:
    with running(folder) as engine:
        for turn in range(30):
            rid = f"r{turn}"
            engine.frontend.submit(turn % 2, request(rid, [turn + 1], 1))
            engine.frontend.wait_finished(rid)
    assert all(engine.frontend.finish_reason(f"r{turn}") == "length" for turn in range(30))


@pytest.mark.parametrize("depth", ["0", "1"])
def test_an_abort_ends_a_request_frees_its_pages_and_leaves_the_others_alone(folder: Path, depth: str) -> None:
    with running(folder, depth=depth) as engine:
        engine.frontend.submit(0, request("gone", [1, 2, 3], 400), request("stays", [4, 5], 40))
        engine.frontend.wait(lambda frontend: len(frontend.tokens("gone")) > 2, "some tokens")
        engine.frontend.abort(0, "gone")
        engine.frontend.wait_finished("gone", "stays")
        engine.frontend.wait_parked()
        scheduler = engine.engines[0].scheduler
        assert scheduler is not None
        assert scheduler.pool.usage().held == 0
    assert engine.frontend.finish_reason("gone") == "abort"
    assert engine.frontend.tokens("stays") == alone(folder, [4, 5], 40)


def test_an_abort_of_the_last_request_is_in_a_load_report_before_all_ranks_park(folder: Path) -> None:
    with running(folder) as engine:
        engine.frontend.submit(0, request("gone", [1, 2, 3], 400))
        engine.frontend.wait(lambda frontend: len(frontend.tokens("gone")) > 2, "some tokens")
        engine.frontend.abort(0, "gone")
        engine.frontend.wait_finished("gone")
        engine.frontend.wait_parked()
    assert [load.running for load in engine.frontend.loads if load.attn_dp_rank == 0][-1] == 0


def test_a_request_that_cannot_run_is_an_error_output_and_disturbs_nobody(folder: Path) -> None:
    with running(folder, kv_tokens=16) as engine:
        engine.frontend.submit(0, request("long", [1] * 17, 1), request("good", [1, 2], 3))
        engine.frontend.wait_finished("long", "good")
    assert engine.frontend.finish_reason("long") == "error"
    error = engine.frontend.outputs["long"][-1].error
    assert error is not None
    assert "has 17 tokens and needs 18, but the KV cache of a replica holds 16" in error
    assert engine.frontend.tokens("good") == alone(folder, [1, 2], 3)


def test_load_reports_come_with_outputs_and_leave_probes_out(folder: Path) -> None:
    with running(folder) as engine:
        probe = attrs.evolve(request("probe", [0], 1), is_health_check=True)
        engine.frontend.submit(1, probe)
        engine.frontend.wait_finished("probe")
        engine.frontend.submit(0, request("a", [1, 2, 3], 4))
        engine.frontend.wait_finished("a")
    assert all(load.running == load.tokens == 0 for load in engine.frontend.loads if load.attn_dp_rank == 1)
    assert any(load.running == 1 and load.tokens > 3 for load in engine.frontend.loads if load.attn_dp_rank == 0)


def replies_of(engine: RunningEngine, verb: str, call_id: int, **arguments: object) -> list[ControlReply]:
    engine.frontend.control(verb, call_id, **arguments)

    def answered(frontend: FakeFrontend) -> bool:
        return sum(reply.call_id == call_id for reply in frontend.replies) == 2

    engine.frontend.wait(answered, f"both leaders answer {verb}")
    return [reply for reply in engine.frontend.replies if reply.call_id == call_id]


def test_verbs_are_answered_while_parked_and_mistakes_in_them_are_answers(folder: Path) -> None:
    with running(folder) as engine:
        engine.frontend.submit(0, request("a", [1] * 12, 2))
        engine.frontend.wait_finished("a")
        engine.frontend.wait_parked()
        flushed = replies_of(engine, "flush_cache", 1)
        assert {reply.rank: reply.result["flushed_pages"] for reply in flushed} == {0: 3, 1: 0}
        receipts = replies_of(engine, "receipt", 2)
        assert [reply.result["counts"]["forward"] for reply in receipts] == [{"prefill": 1, "decode": 1}] * 2
        assert all(reply.error is None for reply in replies_of(engine, "server_info", 3))
        errors = [reply.error for reply in replies_of(engine, "nonsense", 4)]
        assert all(error is not None and "no verb 'nonsense'; known: " in error for error in errors)
        off = [reply.error for reply in replies_of(engine, "start_expert_distribution_record", 5)]
        assert all(error is not None and "recorder.mode is off" in error for error in off)


def test_recording_counts_every_live_token_once_and_no_probe(folder: Path, tmp_path: Path) -> None:
    config = attrs.evolve(running(folder).config, recorder=RecorderConfig(mode="stat"))
    with RunningEngine(config) as engine:
        engine.frontend.wait_parked()
        replies_of(engine, "start_expert_distribution_record", 1)
        probe = attrs.evolve(request("probe", [0, 1], 1), is_health_check=True)
        engine.frontend.submit(1, probe)
        engine.frontend.wait_finished("probe")
        engine.frontend.wait_parked()
        engine.frontend.submit(0, request("a", [1, 2, 3], 3))
        engine.frontend.wait_finished("a")
        replies_of(engine, "stop_expert_distribution_record", 2)
        dumped = replies_of(engine, "dump_expert_distribution_record", 3, output_dir=str(tmp_path))
        assert [reply.error for reply in dumped] == [None, None]
        assert [reply.result["passes"] for reply in dumped] == [3, 3]
    import numpy as np

    (file,) = tmp_path.glob("*.npz")
    load = np.load(file)["load"]
    assert load.sum(axis=(0, 2)).tolist() == [(3 + 1 + 1) * 2] * 2


def test_actors_between_steps_are_called_on_every_rank_after_every_step(folder: Path) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    class Actor:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.is_busy = False

        def after_step(self, agreed: object) -> None:
            seen[self.rank].append(agreed.plan.step)  # type: ignore[attr-defined]

    engine = running(folder)
    engine.prepare = lambda one: setattr(one, "between_steps", (Actor(one.place.rank),))
    with engine:
        engine.frontend.submit(0, request("a", [1], 3))
        engine.frontend.wait_finished("a")
        engine.frontend.wait_parked()
    assert seen[0] == seen[1] == list(range(len(seen[0])))


def test_a_rank_that_fails_releases_the_others_with_its_reason(folder: Path) -> None:
    engine = running(folder)

    def break_rank_1(one: RankEngine) -> None:
        if one.place.rank == 1:
            one.link = None  # type: ignore[assignment]

    engine.prepare = break_rank_1
    with pytest.raises(RankFailure) as failure, engine:
        pass
    assert "rank 1 failed with AttributeError" in str(failure.value.__cause__)


def test_a_rank_that_does_not_come_ends_the_wait_with_its_name(folder: Path) -> None:
    config = running(folder).config
    engine = RunningEngine(attrs.evolve(config, launch=attrs.evolve(config.launch, step_deadline_s=0.5)))
    held = threading.Event()

    def hold_rank_1(one: RankEngine) -> None:
        if one.place.rank == 1:
            held.wait(2)
            raise RankLost("held in the test")

    engine.prepare = hold_rank_1
    with pytest.raises(RankFailure) as failure, engine:
        pass
    held.set()
    assert "step 0: replica 1 (rank 1, never seen) did not arrive" in str(failure.value.__cause__)


def test_ranks_that_were_started_differently_all_stop_before_weights_are_loaded(folder: Path) -> None:
    config = running(folder).config
    other = attrs.evolve(config, padding=attrs.evolve(config.padding, name="sum_len"))

    def build(context: RankContext) -> str:
        plan = plan_rank(other if context.rank == 1 else config, context.rank)
        with pytest.raises(AgreementError) as error, build_engine(plan, context.comms_of(plan.sizes), OfflineLink()):
            pass
        return str(error.value)

    for sentence in OneProcessWorld(parallel_sizes(config.parallel)).run(build):
        assert "ranks do not agree on padding." in sentence
        assert "rank 1 found" in sentence


def test_a_profile_is_a_file_a_rank_between_start_and_stop(folder: Path, tmp_path: Path) -> None:
    with running(folder) as engine:
        (none, _) = replies_of(engine, "stop_profile", 1)
        assert none.error is not None
        assert "no profile is being taken" in none.error
        started = replies_of(engine, "start_profile", 2, output_dir=str(tmp_path))
        engine.frontend.submit(0, request("a", [1, 2, 3], 3))
        engine.frontend.wait_finished("a")
        stopped = replies_of(engine, "stop_profile", 3)
    files = {reply.rank: reply.result["files"] for reply in stopped}
    assert files == {reply.rank: reply.result["files"] for reply in started}
    assert sorted(str(path) for path in tmp_path.iterdir()) == sorted(
        name for names in files.values() for name in names
    )
    for rank, (name,) in files.items():
        spans = read_trace(Path(name))[rank]
        assert len({span.step for span in spans}) == 3, "the idle replica ran every step too"
        assert {"attention", "experts", "wait"} <= {span.category for span in spans}
