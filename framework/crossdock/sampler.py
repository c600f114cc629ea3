"""Chooses tokens from logits, vectorised over the rows of a step; every row by its own parameters and its own noise.

Runs on the leader of a replica only: its choice reaches the attention-TP peers with the next step's rows. A row's result depends on its
logits, its parameters, its own tokens, and (seed, position), nothing else in the batch. Greedy rows take the exact argmax, the
lowest id among equals. Log-probabilities are those of the model's own logits, before penalties, bias and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock.noise import exponential_noise
from crossdock.types.request import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-6
"""Smaller temperatures are greedy: dividing by them overflows float32."""


@attrs.frozen(kw_only=True, eq=False)
class SamplingRow:
    """One row to be sampled."""

    params: SamplingParams
    position: int
    """Position that the chosen token will have in its sequence."""
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    """Token ids that must not be chosen now: ends that come before ``min_new_tokens``."""

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_penalised(self) -> bool:
        """The tokens so far matter to the choice."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return bool(self.params.logit_bias) or bool(self.forbidden) or self.is_penalised


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """``logits`` [S, V] float32, one for each row -> [S] int64 token ids on the same device. ``logits`` is not changed."""
    if any(row.changes_logits for row in rows):
        logits = _changed_logits(logits, rows)
    greedy = logits.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        greedy[index] = _draw(logits[index], [rows[i] for i in drawn])
    return greedy


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of ``token_ids`` [R] under ``logits`` [R, V] float32 with the ``counts[r]`` best alternatives of each row."""
    if not counts:
        return []
    scores = torch.log_softmax(logits.to(torch.float32), dim=-1)
    chosen = scores.gather(1, token_ids.unsqueeze(1))
    ranks = (scores > chosen).sum(dim=1).tolist()
    most = min(max(counts), logits.shape[1])
    best_scores, best_ids = scores.topk(most, dim=-1)
    best = zip(best_ids.tolist(), best_scores.tolist(), strict=True)
    rows = zip(token_ids.tolist(), chosen.squeeze(1).tolist(), ranks, best, counts, strict=True)
    return [
        TokenLogprob(token_id=token, logprob=score, rank=rank, top=tuple(zip(ids[:count], values[:count], strict=True)))
        for token, score, rank, (ids, values), count in rows
    ]


def _changed_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, then bias, then forbidden ids, row by row: few rows have any and each touches its own tokens only."""
    logits = logits.clone()
    for row, scores in zip(rows, logits, strict=True):
        p = row.params
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*row.prompt, *row.generated}), device=logits.device)
            values = scores[seen]
            scores[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0) and row.generated:
            counts = torch.bincount(torch.tensor(list(row.generated), device=logits.device), minlength=scores.shape[0])
            scores -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts
        if p.logit_bias:
            ids = torch.tensor([token for token, _ in p.logit_bias], device=logits.device)
            scores.index_add_(0, ids, torch.tensor([bias for _, bias in p.logit_bias], device=logits.device))
        if row.forbidden:
            scores[torch.tensor(list(row.forbidden), device=logits.device)] = -torch.inf
    return logits


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """One sample a row: temperature, min-p, top-k, top-p, then the exponential race."""
    scores = logits / _column([row.params.temperature for row in rows], logits)
    seeds = torch.tensor([_signed(row.params.seed) for row in rows], device=logits.device)
    positions = torch.tensor([row.position for row in rows], device=logits.device)
    if any(row.params.min_p > 0.0 for row in rows):
        floor = torch.tensor([row.params.min_p for row in rows], device=logits.device).log().unsqueeze(1)
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, -torch.inf)
    if any(row.params.top_k > 0 or row.params.top_p < 1.0 for row in rows):
        scores, token_ids = scores.sort(dim=-1, descending=True, stable=True)
        scores = _best_only(scores, rows)
    else:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    probabilities = torch.softmax(scores.to(torch.float64), dim=-1)
    winner = (probabilities / exponential_noise(seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    return winner.squeeze(1) if token_ids.dim() == 1 else token_ids.gather(1, winner).squeeze(1)


def _best_only(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sorted ``scores`` [S, V] with all but the top-k, and of those all beyond the top-p mass, at -inf; the best always stays."""
    vocab = scores.shape[1]
    places = torch.arange(vocab, device=scores.device)
    kept = torch.tensor([row.params.top_k if row.params.top_k > 0 else vocab for row in rows], device=scores.device)
    scores = scores.masked_fill(places >= kept.unsqueeze(1), -torch.inf)
    if any(row.params.top_p < 1.0 for row in rows):
        probabilities = torch.softmax(scores, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        mass = _column([row.params.top_p for row in rows], scores)
        dropped = (before >= mass) & (mass < 1.0) & (places > 0)
        scores = scores.masked_fill(dropped, -torch.inf)
    return scores


def _signed(seed: int) -> int:
    """The seed's low 64 bits as int64."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low
