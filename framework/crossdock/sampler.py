"""Chooses tokens from logits, vectorised over the rows of a step; every row by its own parameters and its own noise.

Runs on the leader of a replica only: its choice reaches the attention-TP peers with the next step's rows. A row's result depends on its
logits, its parameters, its own tokens, and (seed, position), nothing else in the batch. Greedy rows take the exact argmax, the
lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock.host_values import floats, on_device
from crossdock.noise import exponential_noise
from crossdock.ops.sample_race_cpu import sample_race_cpu, takes
from crossdock.types.request import SamplingParams

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
    def changes_logits(self) -> bool:
        return bool(self.params.logit_bias) or bool(self.forbidden) or self.params.is_penalised


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """``logits`` [S, V] float32, one for each row -> [S] int64 token ids on the same device. ``logits`` is not changed."""
    if any(row.changes_logits for row in rows):
        logits = _changed_logits(logits, rows)
    greedy = logits.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        index = on_device(drawn, torch.int64, logits.device)
        greedy[index] = _draw(logits[index], [rows[i] for i in drawn])
    return greedy


def _changed_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, then bias, then forbidden ids, row by row: few rows have any and each touches its own tokens only."""
    logits = logits.clone()
    for row, scores in zip(rows, logits, strict=True):
        p = row.params
        if p.repetition_penalty != 1.0:
            seen = on_device(sorted({*row.prompt, *row.generated}), torch.int64, logits.device)
            values = scores[seen]
            scores[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0) and row.generated:
            generated = on_device(row.generated, torch.int64, logits.device)
            counts = torch.bincount(generated, minlength=scores.shape[0])
            scores -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts
        if p.logit_bias:
            ids = on_device([token for token, _ in p.logit_bias], torch.int64, logits.device)
            scores.index_add_(0, ids, on_device([bias for _, bias in p.logit_bias], torch.float32, logits.device))
        if row.forbidden:
            scores[on_device(row.forbidden, torch.int64, logits.device)] = -torch.inf
    return logits


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return on_device(values, torch.float32, like.device).unsqueeze(1)


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
        index = on_device(plain, torch.int64, logits.device)
        every = torch.arange(logits.shape[1], device=logits.device)
        chosen[index] = _race(scores[index], every, [rows[place] for place in plain])
    if filtered:
        index = on_device(filtered, torch.int64, logits.device)
        chosen[index] = _draw_filtered(scores[index], [rows[place] for place in filtered])
    return chosen


def _draw_filtered(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Samples among the top-k and top-p tokens of each row, from the few best where those are certain to be enough."""
    narrow = min(_NARROW, scores.shape[1])
    totals = scores.logsumexp(dim=-1, keepdim=True)
    best, best_ids = scores.topk(narrow, dim=-1)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    is_narrow = [0 < row.params.top_k <= narrow for row in rows]
    if any(row.params.top_k <= 0 for row in rows):
        # The host must know how much mass the best hold: such a step waits for the device.
        masses = floats((best - totals).exp().sum(dim=-1))
        is_narrow = [
            fits or (row.params.top_k <= 0 and mass >= row.params.top_p + _MASS_SLACK)
            for fits, row, mass in zip(is_narrow, rows, masses, strict=True)
        ]
    few = [place for place, enough in enumerate(is_narrow) if enough]
    all_sorted = [place for place, enough in enumerate(is_narrow) if not enough]
    if few:
        some, index = [rows[place] for place in few], on_device(few, torch.int64, scores.device)
        chosen[index] = _race(_best_only(best[index], totals[index], some), best_ids[index], some)
    if all_sorted:
        some, index = [rows[place] for place in all_sorted], on_device(all_sorted, torch.int64, scores.device)
        ordered, ids = scores[index].sort(dim=-1, descending=True, stable=True)
        chosen[index] = _race(_best_only(ordered, totals[index], some), ids, some)
    return chosen


def _best_only(scores: torch.Tensor, totals: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sorted ``scores`` [S, C] with all but the top-k, and of those all beyond the top-p mass, at -inf; the best always stays.

    ``totals`` [S, 1]: log of the sum of exponentials over the whole vocabulary, for rows without top-k.
    """
    places = torch.arange(scores.shape[1], device=scores.device)
    limits = [row.params.top_k if row.params.top_k > 0 else scores.shape[1] for row in rows]
    scores = scores.masked_fill(places >= on_device(limits, torch.int64, scores.device).unsqueeze(1), -torch.inf)
    if any(row.params.top_p < 1.0 for row in rows):
        has_top_k = on_device([row.params.top_k > 0 for row in rows], torch.bool, scores.device).unsqueeze(1)
        probabilities = (scores - torch.where(has_top_k, scores.logsumexp(dim=-1, keepdim=True), totals)).exp()
        before = probabilities.cumsum(dim=-1) - probabilities
        mass = _column([row.params.top_p for row in rows], scores)
        scores = scores.masked_fill((before >= mass) & (mass < 1.0) & (places > 0), -torch.inf)
    return scores


def _race(scores: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """``scores`` [S, C] of the tokens ``token_ids`` [C] or [S, C] -> [S] sampled ids."""
    seeds = on_device([_signed(row.params.seed) for row in rows], torch.int64, scores.device)
    positions = on_device([row.position for row in rows], torch.int64, scores.device)
    if takes(scores):
        winner = sample_race_cpu(scores, seeds, positions, token_ids).unsqueeze(1)
    else:
        weights = (scores - scores.amax(dim=-1, keepdim=True)).to(torch.float64).exp_()
        winner = weights.div_(exponential_noise(seeds, positions, token_ids)).argmax(dim=-1, keepdim=True)
    return winner.squeeze(1) if token_ids.dim() == 1 else token_ids.gather(1, winner).squeeze(1)


def _signed(seed: int) -> int:
    """The seed's low 64 bits as int64."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low
