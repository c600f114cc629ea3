"""What ranks count about their steps, as ``/metrics`` shows it."""

from __future__ import annotations

from crossdock.serving.metrics import ServerMetrics
from crossdock.serving.replicas import Replica
from crossdock.types.request import ReplicaLoad
from crossdock.types.step_totals import ITERATION_TOKENS, StepTotals, empty_histogram, observed
from prometheus_client.parser import text_string_to_metric_families

EP_NAMES = {
    "num_preemptions",
    "iteration_tokens_total",
    "dp_attention_tokens",
    "dp_attention_pairs",
    "dp_attention_steps",
    "dp_attention_token_imbalance_ratio",
    "dp_attention_sync_wait_seconds",
}


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """Values by name and labels without the model's name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[f"{sample.name.removeprefix('crossdock:')} {' '.join(labels)}".strip()] = sample.value
    return found


def test_every_family_is_there_before_the_first_report() -> None:
    metrics = ServerMetrics("m", 2)
    families = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    assert {f"crossdock:{name}" for name in EP_NAMES} <= families
    assert samples(metrics)["num_preemptions_total engine=1"] == 0.0


def test_the_last_report_of_each_replica_is_shown() -> None:
    metrics = ServerMetrics("m", 2)
    replica = Replica(attn_dp_rank=1, leader=2)
    rows = empty_histogram(ITERATION_TOKENS)
    for value in (1, 7, 40):
        rows = observed(rows, ITERATION_TOKENS, value)
    for preemptions in (1, 4):
        steps = StepTotals(active_steps=3, idle_steps=2, tokens=48, tokens_behind=5, iteration_tokens=rows)
        replica.load = ReplicaLoad(
            attn_dp_rank=1,
            running=0,
            waiting=0,
            tokens=0,
            attention_pairs=0,
            kv_usage=0.0,
            step=9,
            preemptions=preemptions,
            steps=steps,
        )
        metrics.replica_reported(replica)
    found = samples(metrics)
    assert found["num_preemptions_total engine=1"] == 4
    assert found["dp_attention_tokens_total engine=1 kind=scheduled"] == 48
    assert found["dp_attention_tokens_total engine=1 kind=imbalance"] == 5
    assert found["dp_attention_steps_total engine=1 rank_state=idle"] == 2
    assert found["dp_attention_steps_total engine=0 rank_state=active"] == 0
    buckets = {bound: found[f"iteration_tokens_total_bucket engine=1 le={bound}"] for bound in ("1.0", "8.0", "64.0")}
    assert buckets == {"1.0": 1, "8.0": 2, "64.0": 3}
    assert found["iteration_tokens_total_sum engine=1"] == 48
    assert found["iteration_tokens_total_count engine=1"] == 3
