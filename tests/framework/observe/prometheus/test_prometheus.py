"""The prometheus observer writes what it was told, and nothing of probes."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from crossdock.errors import ConfigValueError
from crossdock.observe.observers import make_observer, make_observers
from crossdock.testing.observer_conformance import SAMPLE_STEP
from crossdock.types.observer import ObserverSpec
from prometheus_client.parser import text_string_to_metric_families

STEP = attrs.evolve(
    SAMPLE_STEP,
    rank=1,
    attn_dp_rank=1,
    local_tokens=2,
    all_tokens=(6, 2),
    attention_pairs=(30, 10),
    sync_wait_s=0.5,
)


def spec(folder: Path | None) -> ObserverSpec:
    return ObserverSpec(rank=1, attn_dp_rank=1, num_ranks=2, output_folder=None if folder is None else str(folder))


def samples(folder: Path) -> dict[str, float]:
    text = (folder / "crossdock_rank1.prom").read_text()
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_steps_are_summed_and_written_every_so_many_steps(tmp_path: Path) -> None:
    observer = make_observer("prometheus", {"every_steps": 2}, spec(tmp_path))
    assert observer is not None
    observer.on_step(STEP)
    assert list(tmp_path.iterdir()) == []
    observer.on_step(attrs.evolve(STEP, is_health_check=True, all_tokens=(1000, 1000)))
    observer.on_load("decode", (1.0, 0.5))
    observer.on_step(STEP)
    found = samples(tmp_path)
    assert found["crossdock_steps_total['decode', 'max_len', 'normal']"] == 2
    assert found["crossdock_dp_attention_tokens_total[]"] == 16
    assert found["crossdock_dp_attention_pairs_total[]"] == 80
    assert found["crossdock_dp_attention_sync_wait_seconds_total[]"] == 1.0
    assert found["crossdock_dp_attention_token_imbalance_ratio[]"] == 1.5
    assert found["crossdock_eplb_balancedness['decode']"] == 0.75


def test_rebalances_and_faults_are_written_at_once(tmp_path: Path) -> None:
    observer = make_observer("prometheus", {"folder": str(tmp_path / "own")}, spec(None))
    assert observer is not None
    observer.on_rebalance({"outcome": "applied"})
    observer.on_fault(0, "rank 0 ended")
    found = samples(tmp_path / "own")
    assert found["crossdock_eplb_rebalances_total['applied']"] == 1
    assert found["crossdock_faults_total[]"] == 1


def test_a_step_without_rows_divides_by_nothing(tmp_path: Path) -> None:
    observer = make_observer("prometheus", {"every_steps": 1}, spec(tmp_path))
    assert observer is not None
    observer.on_step(attrs.evolve(STEP, all_tokens=(0, 0)))
    observer.on_load("idle", ())
    assert samples(tmp_path)["crossdock_dp_attention_tokens_total[]"] == 0


def test_without_a_folder_there_is_nothing_to_observe() -> None:
    assert make_observer("prometheus", {}, spec(None)) is None
    assert make_observers(["prometheus"], {}, spec(None)) == ()
    with pytest.raises(ConfigValueError, match=r"\[observer\.prometheus\] every_steps"):
        make_observer("prometheus", {"every_steps": 0}, spec(None))
