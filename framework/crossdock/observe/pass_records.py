"""What the fine-grained modes keep of a pass: the last passes, each with the placement of its time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

    from crossdock.types.batch import ForwardBatch
    from crossdock.types.location import PlacementMaps


@attrs.frozen(kw_only=True, eq=False)
class PassRecord:
    """One pass on one rank, for ``per_pass`` and ``per_token``; tensors stay on the device until a dump."""

    pass_id: int
    physical_count: torch.Tensor
    """[L, P] int32."""
    physical_to_logical: torch.Tensor | None = None
    """[L, P] int64: the map of that time; None when it is the one in force."""
    topk_ids: tuple[torch.Tensor, ...] = ()
    """Per layer [n, K] int64 physical ids, -1 where a row carries no token."""
    input_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    query_lens: tuple[int, ...] = ()
    forward_mode: str = ""


class PassRecords:
    """The last ``most`` passes. A copy of the map is made for the first pass after a change, not for each."""

    def __init__(self, most: int, maps: PlacementMaps) -> None:
        self._maps = maps
        self._map: torch.Tensor | None = None
        self._records: deque[PassRecord] = deque(maxlen=most)

    def all(self) -> tuple[PassRecord, ...]:
        """Oldest first."""
        return tuple(self._records)

    def clear(self) -> None:
        self._records.clear()

    def map_changes(self) -> None:
        """The map is about to be overwritten."""
        self._map = None

    def add(
        self,
        pass_id: int,
        counts: torch.Tensor,
        *,
        batch: ForwardBatch | None = None,
        topk_ids: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """``counts``: [L, P] int32, kept as it is; with a batch its tokens are kept, too."""
        if self._map is None:
            self._map = self._maps.physical_to_logical.clone()
        record = PassRecord(pass_id=pass_id, physical_count=counts, physical_to_logical=self._map)
        if batch is not None:
            record = attrs.evolve(
                record,
                topk_ids=topk_ids,
                input_ids=batch.input_ids,
                positions=batch.positions,
                query_lens=batch.query_lens,
                forward_mode=batch.forward_mode.name.lower(),
            )
        self._records.append(record)
