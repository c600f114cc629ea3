"""What a request asks of the engine, in one form for completions, chat and ``/generate``."""

from __future__ import annotations

import attrs

from crossdock.types.request import EngineRequest, SamplingParams

_MASK = 2**64 - 1


@attrs.frozen(kw_only=True)
class PromptTokens:
    """One prompt; ``text`` as the client sent it, None where it sent ids."""

    ids: tuple[int, ...]
    text: str | None = None


@attrs.frozen(kw_only=True)
class GenerationPlan:
    """A validated request. Choice ``index = prompt number * n + sample number`` everywhere."""

    request_id: str
    prompts: tuple[PromptTokens, ...]
    n: int
    sampling: tuple[SamplingParams, ...]
    """One a prompt: ``max_new_tokens`` may depend on the prompt's length."""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    routed_dp_rank: int | None = None
    is_health_check: bool = False
    priority: int = 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def rid(self, index: int) -> str:
        """The engine's id of one choice."""
        return f"{self.request_id}-{index}"

    def engine_request(self, index: int) -> EngineRequest:
        """The sequence of one choice."""
        prompt, sample = divmod(index, self.n)
        sampling = self.sampling[prompt]
        return EngineRequest(
            rid=self.rid(index),
            prompt_ids=self.prompts[prompt].ids,
            sampling=attrs.evolve(sampling, seed=sample_seed(sampling.seed, sample)),
            is_health_check=self.is_health_check,
            priority=self.priority,
        )


def sample_seed(seed: int, sample: int) -> int:
    """Seed of one of ``n`` samples: the request's own for the first, well mixed ones after it (splitmix64's finaliser)."""
    if sample == 0:
        return seed
    mixed = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
