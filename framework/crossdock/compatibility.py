"""Checks the whole selection before weights are loaded: accepted, or refused with codes, sentences and what works instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crossdock.compatibility_rules import Finding, findings
from crossdock.config import AUTO, Config
from crossdock.config_rules import parallel_sizes
from crossdock.errors import CrossdockError, SelectionRefused
from crossdock.installation import top_level_modules
from crossdock.registry import installed
from crossdock.selection_parts import Part, PartLoader, make_candidate
from crossdock.types.capability import (
    Environment,
)
from crossdock.types.model import ModelInfo
from crossdock.types.selection import Selection


def make_environment(config: Config, *, dtype: str | None = None, model: ModelInfo | None = None) -> Environment:
    """Where the selection is to run. ``dtype`` is what ``auto`` resolved to; float32 is assumed when nobody knows yet."""
    configured = config.checkpoint.dtype
    return Environment(
        device=config.launch.device,
        sizes=parallel_sizes(config.parallel),
        dtype=dtype or ("float32" if configured == AUTO else configured),
        packages=top_level_modules(),
        num_nodes=config.launch.nnodes,
        max_rows_per_rank=config.scheduler.max_step_tokens,
        max_decode_rows=config.scheduler.max_running_requests,
        model=model,
    )


def check_selection(config: Config, *, dtype: str | None = None, model: ModelInfo | None = None) -> Selection:
    """The checked selection of a config; the same on every rank, no device touched, torch not imported.

    Args:
        config: the configuration; options are read by the plugins themselves.
        dtype: name of the compute dtype, when it is known.
        model: facts of the checkpoint, when they are known.

    Raises:
        PluginError, ConfigValueError: a plugin cannot be loaded or an option is wrong; several are reported together.
        SelectionRefused: it cannot run; with every code, a sentence each, and what works instead.
    """
    env = make_environment(config, dtype=dtype, model=model)
    loader = PartLoader(config, env)
    chosen = loader.chosen()
    refused = [Finding(refusal=part.refusal, points=(point,)) for point, part in chosen.items() if part.refusal]
    if not refused:
        refused = list(findings(make_candidate(config, env, chosen)))
    if refused:
        sentences = [_with_alternative(finding, config, env, loader, chosen) for finding in refused]
        raise SelectionRefused([finding.refusal.code for finding in refused], sentences)
    return Selection(
        sizes=env.sizes,
        device=env.device,
        dtype=env.dtype,
        plugins=tuple(part.chosen_plugin() for part in chosen.values()),
        observers=loader.observers(),
    )


def _with_alternative(
    finding: Finding, config: Config, env: Environment, loader: PartLoader, parts: Mapping[str, Part]
) -> str:
    """The sentence, and the installed plugins that would do in its place."""
    usable = [f"{point} {name!r}" for point, name in _alternatives(finding, config, env, loader, parts)]
    sentence = finding.refusal.sentence
    return f"{sentence}; works instead: {', '.join(usable)}" if usable else sentence


def _alternatives(
    finding: Finding, config: Config, env: Environment, loader: PartLoader, parts: Mapping[str, Part]
) -> Iterator[tuple[str, str]]:
    others_fit = all(part.refusal is None for point, part in parts.items() if point not in finding.points)
    for point in finding.points:
        if point == "model" or not others_fit:
            continue
        for plugin in installed(point):
            if plugin.name == parts[point].plugin.name:
                continue
            try:
                part = loader.part(point, plugin.name)
            except CrossdockError:
                continue
            if part.refusal is not None:
                continue
            replaced = {**parts, point: part}
            if any(other.refusal for other in replaced.values()):
                continue
            codes = {other.refusal.code for other in findings(make_candidate(config, env, replaced))}
            if finding.refusal.code not in codes:
                yield point, plugin.name
