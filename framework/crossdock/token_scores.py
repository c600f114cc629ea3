"""Log-probabilities of tokens: computed when a step is launched, read when it is collected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdock.host_values import HostCopy, float_rows, floats, int_rows, ints
from crossdock.types.request import TokenLogprob


class TokenScores:
    """Log-probabilities of ``token_ids`` [R] under ``logits`` [R, V] float32, with the ``counts[r]`` best alternatives of each row.

    ``logits`` may be overwritten as soon as this is made.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> None:
        self._counts = tuple(counts)
        scores = torch.log_softmax(logits.to(torch.float32), dim=-1)
        chosen = scores.gather(1, token_ids.unsqueeze(1))
        best_scores, best_ids = scores.topk(min(max(counts, default=0), logits.shape[1]), dim=-1)
        ranks = (scores > chosen).sum(dim=1)
        self._copy = HostCopy(token_ids, chosen.squeeze(1), ranks, best_ids, best_scores)

    def entries(self) -> list[TokenLogprob]:
        """One for each row; waits for the device."""
        token_ids, chosen, ranks, best_ids, best_scores = self._copy.wait()
        best = zip(int_rows(best_ids), float_rows(best_scores), strict=True)
        rows = zip(ints(token_ids), floats(chosen), ints(ranks), best, self._counts, strict=True)
        return [
            TokenLogprob(
                token_id=token, logprob=score, rank=rank, top=tuple(zip(ids[:count], values[:count], strict=True))
            )
            for token, score, rank, (ids, values), count in rows
        ]
