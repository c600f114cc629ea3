"""Verbs of the expert-load recorder: start, stop and dump, on every rank between the same two steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from crossdock.control_verbs import Verb
from crossdock.errors import ConfigValueError
from crossdock.observe.recorder import ExpertLoadRecorder, RecorderMode
from crossdock.observe.recorder_dump import write_records, write_stat
from crossdock.types.comm import GroupComm
from crossdock.types.location import PlacementMaps

DUMP_WINDOW = 1000
"""Passes over which a dump states balancedness."""


@attrs.frozen(kw_only=True, eq=False)
class RecorderVerbs:
    """Bound to one rank's recorder."""

    recorder: ExpertLoadRecorder | None
    """None when ``recorder.mode`` is off or the model is dense."""
    mode: RecorderMode
    maps: PlacementMaps | None
    layers: Sequence[int]
    """Model layer numbers of the recorder's rows."""
    world: GroupComm
    rank: int

    def verbs(self) -> Mapping[str, Verb]:
        """By the names that the server's routes use."""
        return {
            "start_expert_distribution_record": self.start,
            "stop_expert_distribution_record": self.stop,
            "dump_expert_distribution_record": self.dump,
        }

    def start(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Forgets what was recorded and starts."""
        wanted = arguments.get("mode")
        if wanted is not None and wanted != self.mode.value:
            raise ConfigValueError(
                [f"recorder.mode is {self.mode.value!r} and is set at start; {wanted!r} was asked for"]
            )
        return {"was_recording": not self._present().start()}

    def stop(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the counts and counts no more."""
        recorder = self._present()
        recorder.stop()
        return {"passes": recorder.num_passes}

    def dump(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the recording to ``output_dir`` (the working folder by default) and sums it up; a collective."""
        recorder = self._present()
        folder = Path(str(arguments.get("output_dir") or "."))
        counts = recorder.logical_counts(self.world)
        now = torch.tensor([time.time()], dtype=torch.float64, device=counts.device)
        stamp = f"{float(self.world.broadcast(now, 0)):.6f}"
        windows = recorder.balancedness(self.world, (DUMP_WINDOW,))
        per_layer = windows.get(DUMP_WINDOW, ())
        balancedness = sum(per_layer) / len(per_layer) if per_layer else None
        files: list[str] = []
        if self.rank == 0:
            files += [str(path) for path in write_stat(folder, stamp, counts, self.layers, balancedness)]
        if self.mode in (RecorderMode.PER_PASS, RecorderMode.PER_TOKEN) and self.maps is not None:
            files.append(str(write_records(folder, stamp, self.rank, recorder.records, self.maps)))
        return {
            "passes": int(counts.shape[0]),
            "layers": int(counts.shape[1]),
            "experts": int(counts.shape[2]),
            "choices": int(counts.sum()),
            "balancedness": balancedness,
            "files": files,
        }

    def _present(self) -> ExpertLoadRecorder:
        if self.recorder is None:
            raise ConfigValueError(["nothing is recorded: recorder.mode is off, or the model has no experts"])
        return self.recorder
