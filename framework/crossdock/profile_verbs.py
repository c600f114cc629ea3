"""Verbs of the timeline: every rank starts and stops between the same two steps and writes a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from crossdock.control_verbs import Verb
from crossdock.errors import ConfigValueError
from crossdock.observe.timeline import Timeline
from crossdock.observe.trace_files import write_trace
from crossdock.types.parallel import ParallelSizes, RankPlace


@attrs.define(kw_only=True, eq=False)
class ProfileVerbs:
    """Bound to one rank's timeline."""

    timeline: Timeline
    place: RankPlace
    sizes: ParallelSizes
    _folder: Path = attrs.field(factory=Path, init=False)
    _profiles: int = attrs.field(default=0, init=False)

    def verbs(self) -> Mapping[str, Verb]:
        """By the names that the server's routes use."""
        return {"start_profile": self.start, "stop_profile": self.stop}

    def start(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Starts; ``output_dir`` is the working folder by default. The files that a stop will write are named at once."""
        if self.timeline.is_profiling:
            raise ConfigValueError(["a profile is being taken; stop it first"])
        self._folder = Path(str(arguments.get("output_dir") or ".")).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiles += 1
        self.timeline.start_profile()
        return {"files": self._files()}

    def stop(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Writes what was timed since the start; the files of this replica's ranks."""
        if not self.timeline.is_profiling:
            raise ConfigValueError(["no profile is being taken; start one first"])
        spans = self.timeline.stop_profile()
        write_trace(self._path(self.place.rank), self.place.rank, spans)
        return {"files": self._files(), "operations": len(spans)}

    def _files(self) -> list[str]:
        """Of every rank of the replica: only its leader answers."""
        first = self.place.rank - self.place.attn_tp_rank
        return [str(self._path(first + peer)) for peer in range(self.sizes.attn_tp_size)]

    def _path(self, rank: int) -> Path:
        return self._folder / f"crossdock-profile{self._profiles}-rank{rank}.trace.json"
