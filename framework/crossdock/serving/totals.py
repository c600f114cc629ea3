"""Token counts of one client request over all its choices."""

from __future__ import annotations

import attrs

from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.protocol.responses import PromptTokensDetails, Usage


@attrs.define(kw_only=True)
class Totals:
    """Counts a prompt once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    n: int

    def add(self, delta: ChoiceDelta) -> None:
        """Counts one delta; cached tokens of a prompt are those of its first sample."""
        self.completion_tokens += len(delta.token_ids)
        if delta.index % self.n == 0:
            self.cached_tokens += delta.cached_tokens

    def usage(self) -> Usage:
        """As far as it has come."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


def new_totals(plan: GenerationPlan) -> Totals:
    """Totals of a plan before its first delta."""
    return Totals(prompt_tokens=sum(len(prompt.ids) for prompt in plan.prompts), n=plan.n)
