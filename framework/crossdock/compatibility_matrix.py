"""Every combination of installed plugins, accepted or refused with its codes, for one configuration's layout and device."""

from __future__ import annotations

import itertools

import attrs

from crossdock.compatibility import make_environment
from crossdock.compatibility_rules import findings
from crossdock.config import Config
from crossdock.errors import CrossdockError
from crossdock.registry import installed
from crossdock.selection_parts import Part, PartLoader, make_candidate
from crossdock.types.capability import Refusal
from crossdock.types.model import ModelInfo

MATRIX_POINTS = ("dispatcher", "experts", "strategy", "expert_location", "attention")
"""Points whose plugins must suit each other; a padding policy suits everything."""


@attrs.frozen(kw_only=True)
class MatrixRow:
    """One combination."""

    names: tuple[str, ...]
    """In the order of ``MATRIX_POINTS``."""
    refusals: tuple[Refusal, ...]
    """Empty when it is accepted."""


def selection_matrix(
    config: Config, *, dtype: str | None = None, model: ModelInfo | None = None
) -> tuple[tuple[MatrixRow, ...], tuple[Refusal, ...]]:
    """Every combination of loadable plugins, and a refusal for each plugin that cannot be loaded or asked."""
    env = make_environment(config, dtype=dtype, model=model)
    loader = PartLoader(config, env)
    by_point: dict[str, list[Part]] = {}
    broken: list[Refusal] = []
    for point in MATRIX_POINTS:
        by_point[point] = []
        for name in dict.fromkeys(plugin.name for plugin in installed(point)):
            try:
                by_point[point].append(loader.part(point, name))
            except CrossdockError as error:
                broken.append(Refusal(code="not_loadable", sentence=str(error)))
    rows: list[MatrixRow] = []
    for combination in itertools.product(*by_point.values()):
        parts: dict[str, Part] = dict(zip(MATRIX_POINTS, combination, strict=True))
        refusals = tuple(part.refusal for part in combination if part.refusal is not None)
        if not refusals:
            refusals = tuple(finding.refusal for finding in findings(make_candidate(config, env, parts)))
        rows.append(MatrixRow(names=tuple(part.plugin.name for part in combination), refusals=refusals))
    return tuple(rows), tuple(broken)
