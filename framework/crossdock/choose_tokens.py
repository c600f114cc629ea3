"""From the logits of a step to the tokens of its sequences: which rows sample, with what, and which score the prompt."""

from __future__ import annotations

import attrs
import torch

from crossdock.sampler import SamplingRow, logprobs_of, sample
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.sequence import EngineSequence
from crossdock.types.request import TokenLogprob


def choose_tokens(logits: torch.Tensor, scheduled: Scheduled, eos_token_ids: frozenset[int]) -> StepTokens:
    """``logits`` [R, V] float32: the logit rows of ``scheduled`` in order. Runs on the leader."""
    samples = scheduled.samples
    last_rows: list[int] = []
    rows: list[SamplingRow] = []
    end = 0
    for sequence, part, is_sampled in zip(scheduled.sequences, scheduled.work.sequences, samples, strict=True):
        end += part.num_logit_rows
        if is_sampled:
            last_rows.append(end - 1)
            rows.append(sampling_row(sequence, eos_token_ids))
    if not rows:
        return StepTokens(token_ids=(), prompt_logprobs=_prompt_logprobs(logits, scheduled))
    if len(rows) != logits.shape[0]:
        chosen_logits = logits[torch.tensor(last_rows, device=logits.device)]
    else:
        chosen_logits = logits
    ids = sample(chosen_logits, rows)
    return StepTokens(
        token_ids=tuple(ids.tolist()),
        logprobs=_token_logprobs(chosen_logits, ids, rows),
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


def _token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, rows: list[SamplingRow]
) -> tuple[TokenLogprob | None, ...]:
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return ()
    index = torch.tensor(wanted, device=logits.device)
    entries = logprobs_of(logits[index], ids[index], [rows[i].params.logprobs or 0 for i in wanted])
    result: list[TokenLogprob | None] = [None] * len(rows)
    for place, entry in zip(wanted, entries, strict=True):
        result[place] = entry
    return tuple(result)


def _prompt_logprobs(logits: torch.Tensor, scheduled: Scheduled) -> tuple[tuple[TokenLogprob, ...], ...]:
    """For each sequence, entries of the prompt tokens that follow its logit rows; empty when nobody wants any."""
    parts = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
    if not any(s.request.sampling.prompt_logprobs is not None and s.wants_prompt_rows for s, _ in parts):
        return ()
    result: list[tuple[TokenLogprob, ...]] = []
    first = 0
    for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
        count = sequence.request.sampling.prompt_logprobs
        positions = range(rows.end - rows.num_logit_rows, min(rows.end, sequence.num_prompt - 1))
        if count is None or not sequence.wants_prompt_rows or not positions:
            result.append(())
        else:
            following = sequence.request.prompt_ids[positions.start + 1 : positions.stop + 1]
            ids = torch.tensor(following, device=logits.device)
            result.append(tuple(logprobs_of(logits[first : first + len(following)], ids, [count] * len(following))))
        first += rows.num_logit_rows
    return tuple(result)
