"""Adds up what a replica's steps did, for its load reports."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from crossdock.engine_seams import AgreedStep
from crossdock.types.request import ReplicaLoad
from crossdock.types.step_totals import IMBALANCE_RATIOS, ITERATION_TOKENS, SYNC_WAITS_S, StepTotals, observed


@attrs.define(kw_only=True)
class StepTotalsCounter:
    """Acts after each step; never keeps ranks from parking."""

    attn_dp_rank: int = 0
    totals: StepTotals = attrs.Factory(StepTotals)

    @property
    def is_busy(self) -> bool:
        return False

    def added_to(self, load: ReplicaLoad, *, preemptions: int, gauges: Mapping[str, float]) -> ReplicaLoad:
        """The scheduler's report with what it does not know."""
        return attrs.evolve(load, preemptions=preemptions, steps=self.totals, gauges=dict(gauges))

    def after_step(self, agreed: AgreedStep) -> None:
        """Counts a step that computed something."""
        if not (agreed.has_rows and agreed.is_counted):
            return
        rows, pairs = agreed.plan.live_tokens, [record.attention_pairs for record in agreed.records]
        own_rows, own_pairs, before = rows[self.attn_dp_rank], pairs[self.attn_dp_rank], self.totals
        ratio, iteration = before.token_imbalance_ratio, before.iteration_tokens
        if self.attn_dp_rank == 0:
            ratio = observed(ratio, IMBALANCE_RATIOS, max(rows) * len(rows) / sum(rows))
        if own_rows:
            iteration = observed(iteration, ITERATION_TOKENS, own_rows)
        self.totals = StepTotals(
            active_steps=before.active_steps + bool(own_rows),
            idle_steps=before.idle_steps + (not own_rows),
            tokens=before.tokens + own_rows,
            tokens_behind=before.tokens_behind + max(rows) - own_rows,
            attention_pairs=before.attention_pairs + own_pairs,
            attention_pairs_behind=before.attention_pairs_behind + max(pairs) - own_pairs,
            iteration_tokens=iteration,
            token_imbalance_ratio=ratio,
            sync_wait_s=observed(before.sync_wait_s, SYNC_WAITS_S, agreed.wait_s),
        )
