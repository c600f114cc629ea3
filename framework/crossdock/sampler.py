"""Chooses tokens from logits, vectorised over the rows of a step; every row by its own parameters and its own noise.

Runs on the leader of a replica only: its choice reaches the attention-TP peers with the next step's rows. A row's result depends on its
logits, its parameters, its own tokens, and (seed, position), nothing else in the batch. Greedy rows take the exact argmax, the
lowest id among equals. Log-probabilities are those of the model's own logits, before penalties, bias and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock.host_values import float_rows, floats, int_rows, ints
from crossdock.noise import exponential_noise
from crossdock.types.request import SamplingParams, TokenLogprob

_GREEDY_BELOW = 1e-6
"""Smaller temperatures are greedy: dividing by them overflows float32."""
_NARROW = 1024
"""Filters look at so many best tokens before all are sorted; the same for every row, so that rows stay independent."""
_MASS_SLACK = 1e-4
"""Top-p counts as reached among the best only with this much to spare, against rounding of float32 sums."""


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
    ranks = ints((scores > chosen).sum(dim=1))
    most = min(max(counts), logits.shape[1])
    best_scores, best_ids = scores.topk(most, dim=-1)
    best = zip(int_rows(best_ids), float_rows(best_scores), strict=True)
    rows = zip(ints(token_ids), floats(chosen.squeeze(1)), ranks, best, counts, strict=True)
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
    """One sample a row: temperature, min-p, top-k, top-p, then the exponential race.

    A row is handled by one of three forms, by its own parameters and logits only: all tokens, its ``_NARROW`` best, or all sorted.
    """
    scores = logits / _column([row.params.temperature for row in rows], logits)
    if any(row.params.min_p > 0.0 for row in rows):
        floor = _column([row.params.min_p for row in rows], logits).log()
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, -torch.inf)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    filtered = [place for place, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    plain = [place for place in range(len(rows)) if place not in filtered]
    if plain:
        every = torch.arange(logits.shape[1], device=logits.device)
        chosen[plain] = _race(scores[plain], every, [rows[place] for place in plain])
    if filtered:
        chosen[filtered] = _draw_filtered(scores[filtered], [rows[place] for place in filtered])
    return chosen


def _draw_filtered(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Samples among the top-k and top-p tokens of each row, from the few best where those are certain to be enough."""
    narrow = min(_NARROW, scores.shape[1])
    totals = scores.logsumexp(dim=-1, keepdim=True)
    best, best_ids = scores.topk(narrow, dim=-1)
    masses = floats((best - totals).exp().sum(dim=-1))
    chosen = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    is_narrow = [
        row.params.top_k <= narrow if row.params.top_k > 0 else mass >= row.params.top_p + _MASS_SLACK
        for row, mass in zip(rows, masses, strict=True)
    ]
    few = [place for place, enough in enumerate(is_narrow) if enough]
    all_sorted = [place for place, enough in enumerate(is_narrow) if not enough]
    if few:
        some = [rows[place] for place in few]
        chosen[few] = _race(_best_only(best[few], totals[few], some), best_ids[few], some)
    if all_sorted:
        some = [rows[place] for place in all_sorted]
        ordered, ids = scores[all_sorted].sort(dim=-1, descending=True, stable=True)
        chosen[all_sorted] = _race(_best_only(ordered, totals[all_sorted], some), ids, some)
    return chosen


def _best_only(scores: torch.Tensor, totals: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sorted ``scores`` [S, C] with all but the top-k, and of those all beyond the top-p mass, at -inf; the best always stays.

    ``totals`` [S, 1]: log of the sum of exponentials over the whole vocabulary, for rows without top-k.
    """
    places = torch.arange(scores.shape[1], device=scores.device)
    limits = [row.params.top_k if row.params.top_k > 0 else scores.shape[1] for row in rows]
    scores = scores.masked_fill(places >= torch.tensor(limits, device=scores.device).unsqueeze(1), -torch.inf)
    if any(row.params.top_p < 1.0 for row in rows):
        has_top_k = torch.tensor([row.params.top_k > 0 for row in rows], device=scores.device).unsqueeze(1)
        probabilities = (scores - torch.where(has_top_k, scores.logsumexp(dim=-1, keepdim=True), totals)).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        mass = _column([row.params.top_p for row in rows], scores)
        scores = scores.masked_fill((before >= mass) & (mass < 1.0) & (places > 0), -torch.inf)
    return scores


def _race(scores: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """``scores`` [S, C] of the tokens ``token_ids`` [C] or [S, C] -> [S] sampled ids."""
    seeds = torch.tensor([_signed(row.params.seed) for row in rows], device=scores.device)
    positions = torch.tensor([row.position for row in rows], device=scores.device)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).to(torch.float64).exp_()
    winner = weights.div_(exponential_noise(seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    return winner.squeeze(1) if token_ids.dim() == 1 else token_ids.gather(1, winner).squeeze(1)


def _signed(seed: int) -> int:
    """The seed's low 64 bits as int64."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low
