"""From the logits of a step to the tokens of its sequences: which rows sample, with what, and which score the prompt.

In two parts: ``choose`` when the step is launched, all of it on the device, and ``StepChoice.read`` when it is collected. In between the
next step may be launched; it takes the ids from the device and may overwrite the logits.
"""

from __future__ import annotations

import attrs
import torch

from crossdock.host_values import HostCopy, ints, on_device
from crossdock.sampler import SamplingRow, sample
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.sequence import EngineSequence
from crossdock.step_work import SequenceRows
from crossdock.token_scores import TokenScores
from crossdock.types.request import TokenLogprob


@attrs.frozen(kw_only=True, eq=False)
class StepChoice:
    """What was chosen for a launched step, on its way to the host."""

    ids: torch.Tensor
    """[S] int64 on the device, one for each sequence that samples, in order."""
    copy: HostCopy
    """Of ``ids``."""
    scored: tuple[int, ...] = ()
    """Places in ``ids`` whose log-probabilities were asked for."""
    scores: TokenScores | None = None
    """Theirs."""
    prompt_scores: tuple[TokenScores | None, ...] = ()
    """One entry for each sequence of the step; empty when nobody asked."""

    def read(self) -> StepTokens:
        """Everything as host values; waits for the device."""
        (ids,) = self.copy.wait()
        logprobs: list[TokenLogprob | None] = []
        if self.scores is not None:
            logprobs = [None] * self.ids.shape[0]
            for place, entry in zip(self.scored, self.scores.entries(), strict=True):
                logprobs[place] = entry
        return StepTokens(
            token_ids=tuple(ints(ids)),
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(() if part is None else tuple(part.entries()) for part in self.prompt_scores),
        )


def choose(logits: torch.Tensor, scheduled: Scheduled, eos_token_ids: frozenset[int]) -> StepChoice:
    """``logits`` [R, V] float32, the logit rows of ``scheduled`` in order -> the choice of every sequence that samples."""
    pairs = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
    sampled = [(sequence, rows) for sequence, rows in pairs if rows.samples]
    own = _sampled_logits(logits, scheduled)
    if all(sequence.takes_best for sequence, _ in sampled):
        ids = own.argmax(dim=-1)
    else:
        ids = sample(own, [sampling_row(sequence, rows, eos_token_ids) for sequence, rows in sampled])
    return with_scores(ids, logits, scheduled)


def with_scores(ids: torch.Tensor, logits: torch.Tensor, scheduled: Scheduled) -> StepChoice:
    """The choice ``ids`` [S] with the log-probabilities that were asked for."""
    pairs = zip(scheduled.sequences, scheduled.work.sequences, strict=True)
    counts = [sequence.request.sampling.logprobs for sequence, rows in pairs if rows.samples]
    wanted = tuple(place for place, count in enumerate(counts) if count is not None)
    scores = None
    if wanted:
        index = on_device(wanted, torch.int64, logits.device)
        own = _sampled_logits(logits, scheduled)
        scores = TokenScores(own[index], ids[index], [counts[place] or 0 for place in wanted])
    return StepChoice(
        ids=ids, copy=HostCopy(ids), scored=wanted, scores=scores, prompt_scores=_prompt_scores(logits, scheduled)
    )


def takes_best(scheduled: Scheduled) -> bool:
    """Every sequence that samples takes the likeliest token, whatever else there is."""
    return all(sequence.takes_best for sequence in scheduled.sequences)


def sampling_row(sequence: EngineSequence, rows: SequenceRows, eos_token_ids: frozenset[int]) -> SamplingRow:
    """How the token after ``rows`` is chosen."""
    params = sequence.request.sampling
    forbidden: tuple[int, ...] = ()
    if rows.end - sequence.num_prompt < params.min_new_tokens:
        forbidden = params.stop_token_ids + (() if params.ignore_eos else tuple(eos_token_ids))
    row = SamplingRow(params=params, position=rows.end, forbidden=forbidden)
    if not params.is_penalised:
        return row
    generated = tuple(sequence.tokens[sequence.num_prompt : rows.end])
    return attrs.evolve(row, prompt=sequence.request.prompt_ids, generated=generated)


def _sampled_logits(logits: torch.Tensor, scheduled: Scheduled) -> torch.Tensor:
    """The last logit row of each sequence that samples."""
    last_rows: list[int] = []
    end = 0
    for rows in scheduled.work.sequences:
        end += rows.num_logit_rows
        if rows.samples:
            last_rows.append(end - 1)
    if len(last_rows) == logits.shape[0]:
        return logits
    return logits[on_device(last_rows, torch.int64, logits.device)]


def _scores_prompt(sequence: EngineSequence) -> bool:
    return sequence.request.sampling.prompt_logprobs is not None and sequence.wants_prompt_rows


def _prompt_scores(logits: torch.Tensor, scheduled: Scheduled) -> tuple[TokenScores | None, ...]:
    """For each sequence, scores of the prompt tokens that follow its logit rows; empty when nobody wants any."""
    if not any(_scores_prompt(sequence) for sequence in scheduled.sequences):
        return ()
    result: list[TokenScores | None] = []
    first = 0
    for sequence, rows in zip(scheduled.sequences, scheduled.work.sequences, strict=True):
        start = rows.end - rows.num_logit_rows
        following = sequence.request.prompt_ids[start + 1 : rows.end + 1]
        if following and _scores_prompt(sequence):
            ids = on_device(following, torch.int64, logits.device)
            count = sequence.request.sampling.prompt_logprobs or 0
            result.append(TokenScores(logits[first : first + len(following)], ids, [count] * len(following)))
        else:
            result.append(None)
        first += rows.num_logit_rows
    return tuple(result)
