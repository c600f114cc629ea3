"""The plugins of a selection, each loaded and asked once, and what ``auto`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import structlog

from crossdock.compatibility_rules import Candidate, findings
from crossdock.config import AUTO, Config
from crossdock.config_render import loaded_points
from crossdock.dispatch_capacity import RowLimits
from crossdock.errors import ConfigValueError, CrossdockError, PluginDeclined, PluginError, SelectionRefused
from crossdock.plugin_call import call_hook
from crossdock.registry import LoadedPlugin, installed, load_plugin
from crossdock.types.capability import (
    Environment,
    EplbAlgoCapabilities,
    ModelCapabilities,
    ObserverCapabilities,
    PaddingCapabilities,
    RebalancePolicyCapabilities,
    Refusal,
)
from crossdock.types.selection import ChosenPlugin, PassedOver
from crossdock.types.strategy import StrategyCapabilities

_LOG = structlog.get_logger("crossdock")

AUTO_ORDER: Mapping[str, tuple[str, ...]] = {
    "experts": ("triton", "deep_gemm", "torch"),
    "expert_location": ("static", "dynamic"),
    "attention": ("triton", "torch"),
}
"""What ``auto`` tries, best first; discovery order never decides. A plugin that is not listed is taken by name only."""

AUTO_ORDER_FP8: Mapping[str, tuple[str, ...]] = {"experts": ("deep_gemm", "triton", "torch")}
"""Instead of ``AUTO_ORDER`` for models whose experts are fp8 blocks. On an H200, 128 experts of 7168 x 2048 and 256 rows: fp8 1,467 us in
deep_gemm and 2,760 in triton, bf16 2,760 and 2,613 (``docs/gpu-notebook.md``)."""

ONE_RANK_DISPATCHER = "alltoallv"
"""What a job of one rank runs for a dispatcher that this machine cannot run: there is nobody to send to."""

_UNSTATED: Mapping[str, object] = {
    "padding": PaddingCapabilities(),
    "strategy": StrategyCapabilities(),
    "eplb_algo": EplbAlgoCapabilities(),
    "rebalance_policy": RebalancePolicyCapabilities(),
    "model": ModelCapabilities(),
    "observer": ObserverCapabilities(),
}
"""Capabilities of a plugin that states none; points that are not here must state them."""
COMBINED = ("dispatcher", "experts", "strategy", "expert_location", "attention", "model")
"""Points whose capabilities the rules compare."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """A loaded plugin with what it said about itself."""

    plugin: LoadedPlugin
    options: dict[str, Any]
    capabilities: Any
    refusal: Refusal | None
    passed_over: tuple[PassedOver, ...] = ()

    def chosen_plugin(self) -> ChosenPlugin:
        plugin = self.plugin
        return ChosenPlugin(
            point=plugin.point,
            name=plugin.name,
            distribution=plugin.distribution,
            version=plugin.version,
            api=plugin.api,
            options=self.options,
            capabilities=self.capabilities,
            passed_over=self.passed_over,
        )


class PartLoader:
    """Loads parts and asks them, each once."""

    def __init__(self, config: Config, env: Environment) -> None:
        self._config = config
        self._env = env
        self._parts: dict[tuple[str, str], Part] = {}

    def chosen(self) -> dict[str, Part]:
        """The parts that the config names; errors of several points are reported together."""
        wanted = {point: cast("str", getattr(self._config, point).name) for point in loaded_points(self._config)}
        if self._env.model is not None:
            wanted["model"] = self._env.model.model_type
        parts: dict[str, Part] = {}
        errors: list[CrossdockError] = []
        for point, name in wanted.items():
            try:
                if name != AUTO:
                    parts[point] = self.part(point, name)
            except (PluginError, ConfigValueError) as error:
                errors.append(error)
        _raise_together(errors)
        if self._env.sizes.ranks == 1 and "dispatcher" in parts:
            parts["dispatcher"] = self._on_one_rank(parts["dispatcher"])
        for point, name in wanted.items():
            if name == AUTO:
                parts[point] = self._automatic(point, parts)
        return parts

    def part(self, point: str, name: str) -> Part:
        """The plugin ``name`` with its capabilities; the configured options go to the configured name only."""
        key = (point, name)
        if key not in self._parts:
            self._parts[key] = self._ask(load_plugin(point, name), self._options(point, name))
        return self._parts[key]

    def observers(self) -> tuple[ChosenPlugin, ...]:
        """Every observer that the config names, in that order."""
        options = self._config.observer.options
        unknown = [name for name in options if name not in self._config.observer.names]
        if unknown:
            raise ConfigValueError(
                [f"[observer.{name}]: options of an observer that is not in observer.names" for name in unknown]
            )
        parts = [
            self._ask(load_plugin("observer", name), options.get(name, {})) for name in self._config.observer.names
        ]
        return tuple(part.chosen_plugin() for part in parts)

    def _on_one_rank(self, named: Part) -> Part:
        """The dispatcher of a job of one rank, which takes any name (DESIGN section 11); said in the log and the receipt."""
        reason, devices = named.refusal, getattr(named.capabilities, "devices", ())
        if reason is None and self._env.device not in devices:
            sentence = f"dispatcher {named.plugin.name!r} does not run on {self._env.device}"
            reason = Refusal(code="device_not_supported", sentence=sentence)
        if reason is None:
            return named
        _LOG.warning("one rank sends nothing", dispatcher=ONE_RANK_DISPATCHER, reason=reason.sentence)
        passed = PassedOver(name=named.plugin.name, code=reason.code, sentence=reason.sentence)
        return attrs.evolve(self.part("dispatcher", ONE_RANK_DISPATCHER), passed_over=(passed,))

    def _options(self, point: str, name: str) -> dict[str, Any]:
        if point == "model":
            return {}
        choice = getattr(self._config, point)
        return dict(choice.options) if choice.name in (name, AUTO) else {}

    def _ask(self, plugin: LoadedPlugin, options: dict[str, Any]) -> Part:
        hook = f"{plugin.point}_capabilities"
        answer = call_hook(plugin, hook, options=options, env=self._env)
        if answer is None:
            answer = _UNSTATED.get(plugin.point)
        if answer is None:
            raise PluginDeclined(f"{plugin.point} plugin {plugin.name!r} states no capabilities: {hook} returned None")
        refusal = answer if isinstance(answer, Refusal) else None
        return Part(plugin=plugin, options=options, capabilities=answer, refusal=refusal)

    def _automatic(self, point: str, others: Mapping[str, Part]) -> Part:
        """The first of the ordered list that can run beside the other parts."""
        present = {plugin.name for plugin in installed(point)}
        passed: list[PassedOver] = []
        order = self._order(point)
        for name in order:
            if name not in present:
                passed.append(
                    PassedOver(name=name, code="not_installed", sentence=f"{point} {name!r} is not installed")
                )
                continue
            try:
                part = self.part(point, name)
            except PluginError as error:
                passed.append(PassedOver(name=name, code="not_loadable", sentence=str(error)))
                continue
            reason = part.refusal or self._reason_against(point, part, others)
            if reason is None:
                return attrs.evolve(part, passed_over=tuple(passed))
            passed.append(PassedOver(name=name, code=reason.code, sentence=reason.sentence))
        if not order:
            raise ConfigValueError([f'[{point}] name: "auto" is for {", ".join(AUTO_ORDER)}; name a {point} plugin'])
        raise SelectionRefused([other.code for other in passed], [other.sentence for other in passed])

    def _order(self, point: str) -> tuple[str, ...]:
        moe = self._env.model.moe if self._env.model is not None else None
        if moe is not None and moe.weight_dtype == "fp8_block" and point in AUTO_ORDER_FP8:
            return AUTO_ORDER_FP8[point]
        return AUTO_ORDER.get(point, ())

    def _reason_against(self, point: str, part: Part, others: Mapping[str, Part]) -> Refusal | None:
        parts = {**others, point: part}
        for missing in AUTO_ORDER:
            if missing not in parts:
                parts[missing] = self._fallback(missing)
        if any(parts[name].refusal for name in COMBINED if name in parts):
            return None
        for finding in findings(make_candidate(self._config, self._env, parts)):
            if finding.points[:1] == (point,):
                return finding.refusal
        return None

    def _fallback(self, point: str) -> Part:
        """A stand-in for a point that is itself still to be chosen: the last of its list, which runs everywhere."""
        return self.part(point, AUTO_ORDER[point][-1])


def make_candidate(config: Config, env: Environment, parts: Mapping[str, Part]) -> Candidate:
    """What the rules compare, from loaded parts; parts outside ``COMBINED`` are left out."""
    capabilities = {point: parts[point].capabilities for point in COMBINED if point in parts}
    return Candidate(
        env=env,
        names={point: part.plugin.name for point, part in parts.items()},
        model=capabilities.pop("model", ModelCapabilities()),
        limits=RowLimits(
            max_step_tokens=config.scheduler.max_step_tokens, max_running_requests=config.scheduler.max_running_requests
        ),
        survive_dead_rank=config.launch.on_dead_rank == "survive",
        recorder_is_on=config.recorder.mode != "off",
        launcher=config.launch.launcher,
        **capabilities,
    )


def _raise_together(errors: Sequence[CrossdockError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigValueError([str(error) for error in errors])
