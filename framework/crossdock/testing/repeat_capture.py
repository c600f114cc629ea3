"""Step graphs where there is no device graph: the captured pass runs again, operation by operation."""

from collections.abc import Callable

import torch


class Repeater:
    """A `Capturer` that repeats the computation: what a pass reads beside its fixed tensors shows as a wrong result."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs `compute` once; the replay runs it again and writes over the first result."""
        result = compute()

        def replay() -> None:
            result.copy_(compute())

        return replay, result
