"""From the logits of a step to the tokens of its sequences: which rows sample, with what, and which score the prompt.

In two parts, so that ids can stay on the device: ``sample_step`` when the step is launched, ``read_tokens`` when it is collected.
"""

from __future__ import annotations

import attrs
import torch

from crossdock.host_values import ints
from crossdock.sampler import SamplingRow, logprobs_of, sample
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.sequence import EngineSequence
from crossdock.types.request import TokenLogprob


def sample_step(logits: torch.Tensor, scheduled: Scheduled, eos_token_ids: frozenset[int]) -> torch.Tensor:
    """``logits`` [R, V] float32, the logit rows of ``scheduled`` in order -> [S] int64, one id for each sequence that samples."""
    sampled = [s for s, is_sampled in zip(scheduled.sequences, scheduled.samples, strict=True) if is_sampled]
    rows = [sampling_row(sequence, eos_token_ids) for sequence in sampled]
    return sample(_sampled_logits(logits, scheduled), rows)


def read_tokens(logits: torch.Tensor, ids: torch.Tensor, scheduled: Scheduled) -> StepTokens:
    """``ids`` of ``sample_step`` as host values, with the log-probabilities that were asked for."""
    return StepTokens(
        token_ids=tuple(ints(ids)),
        logprobs=_token_logprobs(logits, ids, scheduled),
        prompt_logprobs=_prompt_logprobs(logits, scheduled),
    )


def sampling_row(sequence: EngineSequence, eos_token_ids: frozenset[int]) -> SamplingRow:
    """How the next token of ``sequence`` is chosen."""
    params = sequence.request.sampling
    forbidden: tuple[int, ...] = ()
    if sequence.num_generated < params.min_new_tokens:
        forbidden = params.stop_token_ids + (() if params.ignore_eos else tuple(eos_token_ids))
    row = SamplingRow(params=params, position=len(sequence.tokens), forbidden=forbidden)
    if not row.is_penalised:
        return row
    return attrs.evolve(
        row, prompt=sequence.request.prompt_ids, generated=tuple(sequence.tokens[sequence.num_prompt :])
    )


def _sampled_logits(logits: torch.Tensor, scheduled: Scheduled) -> torch.Tensor:
    """The last logit row of each sequence that samples."""
    last_rows: list[int] = []
    end = 0
    for rows, is_sampled in zip(scheduled.work.sequences, scheduled.samples, strict=True):
        end += rows.num_logit_rows
        if is_sampled:
            last_rows.append(end - 1)
    if len(last_rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(last_rows, dtype=torch.int64, device=logits.device)]


def _token_logprobs(logits: torch.Tensor, ids: torch.Tensor, scheduled: Scheduled) -> tuple[TokenLogprob | None, ...]:
    """One entry for each sequence that samples; empty when nobody asked."""
    sampled = [s for s, is_sampled in zip(scheduled.sequences, scheduled.samples, strict=True) if is_sampled]
    counts = [sequence.request.sampling.logprobs for sequence in sampled]
    wanted = [place for place, count in enumerate(counts) if count is not None]
    if not wanted:
        return ()
    index = torch.tensor(wanted, device=logits.device)
    entries = logprobs_of(
        _sampled_logits(logits, scheduled)[index], ids[index], [counts[place] or 0 for place in wanted]
    )
    result: list[TokenLogprob | None] = [None] * len(sampled)
    for place, entry in zip(wanted, entries, strict=True):
        result[place] = entry
    return tuple(result)


def _scores_prompt(sequence: EngineSequence) -> bool:
    return sequence.request.sampling.prompt_logprobs is not None and sequence.wants_prompt_rows


def _prompt_logprobs(logits: torch.Tensor, scheduled: Scheduled) -> tuple[tuple[TokenLogprob, ...], ...]:
    """For each sequence, entries of the prompt tokens that follow its logit rows; empty when nobody wants any."""
    if not any(_scores_prompt(sequence) for sequence in scheduled.sequences):
        return ()
    result: list[tuple[TokenLogprob, ...]] = []
    first = 0
    for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
        entries: list[TokenLogprob] = []
        start = rows.end - rows.num_logit_rows
        following = sequence.request.prompt_ids[start + 1 : rows.end + 1]
        if following and _scores_prompt(sequence):
            ids = torch.tensor(following, device=logits.device)
            count = sequence.request.sampling.prompt_logprobs or 0
            entries = logprobs_of(logits[first : first + len(following)], ids, [count] * len(following))
        result.append(tuple(entries))
        first += rows.num_logit_rows
    return tuple(result)
