"""Rules 1 to 5 of the facts, section 2: an all-reduce moves about twice what an all-gather does."""

from __future__ import annotations

import attrs
from crossdock.types.step import PaddingMode, StepCounts


@attrs.frozen
class CostPadding:
    """Equal blocks unless unequal ones move less. Source: SGLang's choice between MAX_LEN and SUM_LEN."""

    def choose(self, counts: StepCounts) -> PaddingMode:
        tokens, total = counts.tokens, sum(counts.tokens)
        several = len(tokens) > 1
        # 1, 2: a back end of the step exchanges equal blocks only.
        if counts.symmetric_counts_required:
            return PaddingMode.MAX_LEN
        # 3: padding a prefill to the longest prompt is dear; hybrid state cannot take an empty replica beside it.
        if counts.is_prefill_in_batch and several:
            is_fragile = counts.has_hybrid_state and min(tokens) == 0
            return PaddingMode.MAX_LEN if is_fragile else PaddingMode.SUM_LEN
        # 4: one all-reduce of a small buffer beats a padded gather where there is a kernel for it.
        total_bytes = total * counts.hidden_size * counts.itemsize
        if several and min(tokens) > 0 and total_bytes <= counts.variable_all_reduce_max_bytes:
            return PaddingMode.SUM_LEN
        # 5: the sum as an all-reduce against the largest count as a gather.
        return PaddingMode.MAX_LEN if 2 * total >= max(tokens) * len(tokens) else PaddingMode.SUM_LEN

    def captured_mode(self) -> PaddingMode:
        return PaddingMode.MAX_LEN
