"""Verbs that reach a running engine: some a leader answers alone, some every rank executes between the same two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from crossdock.errors import CrossdockError
from crossdock.types.link import Control, ControlReply

Verb: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Arguments as they came -> a result of plain data."""


@attrs.frozen(kw_only=True, eq=False)
class ControlVerbs:
    """Verbs by name. ``local`` ones touch this leader only; ``together`` ones may hold collectives and run on every rank."""

    local: Mapping[str, Verb] = attrs.field(factory=dict[str, Verb])
    together: Mapping[str, Verb] = attrs.field(factory=dict[str, Verb])

    def run(self, control: Control, rank: int) -> ControlReply:
        """Executes a verb; a mistake in it is an answer, not the end of the engine."""
        verb = self.local.get(control.verb) or self.together.get(control.verb)
        if verb is None:
            known = ", ".join(sorted({*self.local, *self.together}))
            return ControlReply(
                rank=rank, call_id=control.call_id, result={}, error=f"no verb {control.verb!r}; known: {known}"
            )
        try:
            return ControlReply(rank=rank, call_id=control.call_id, result=verb(control.arguments))
        except (CrossdockError, OSError, ValueError, KeyError, TypeError) as error:
            return ControlReply(rank=rank, call_id=control.call_id, result={}, error=f"{control.verb}: {error}")
