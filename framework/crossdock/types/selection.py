"""What was chosen at every point, with what it can do and why the others were passed over."""

from __future__ import annotations

from typing import Any

import attrs

from crossdock.types.parallel import ParallelSizes


@attrs.frozen(kw_only=True)
class PassedOver:
    """A plugin that ``auto`` did not take."""

    name: str
    code: str
    sentence: str


@attrs.frozen(kw_only=True)
class ChosenPlugin:
    """One point's plugin with the options it is built from."""

    point: str
    name: str
    distribution: str
    version: str
    api: int
    options: dict[str, Any]
    capabilities: Any = None
    """The point's capabilities value."""
    passed_over: tuple[PassedOver, ...] = ()


@attrs.frozen(kw_only=True)
class Selection:
    """Everything that was chosen and checked to work together."""

    sizes: ParallelSizes
    device: str
    dtype: str
    plugins: tuple[ChosenPlugin, ...]
    observers: tuple[ChosenPlugin, ...] = ()
    row_invariant: bool = False
    """A row of a step has the same bits whatever rows are beside it."""

    def plugin(self, point: str) -> ChosenPlugin:
        """The plugin of a point.

        Raises:
            KeyError: the selection has none there.
        """
        for chosen in self.plugins:
            if chosen.point == point:
                return chosen
        raise KeyError(point)

    def lines(self) -> tuple[str, ...]:
        """One line a point, for people."""
        lines: list[str] = []
        for chosen in (*self.plugins, *self.observers):
            lines.append(
                f"{chosen.point}: {chosen.name} ({chosen.distribution} {chosen.version}, hook API {chosen.api})"
            )
            lines.extend(f"  not {other.name}: {other.sentence} [{other.code}]" for other in chosen.passed_over)
        return tuple(lines)
