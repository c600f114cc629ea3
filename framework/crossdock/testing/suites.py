"""Every conformance suite in one table; ``crossdock plugins check`` and ``tests/contracts`` run them on installed plugins."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

from crossdock.groups import resolve_sizes
from crossdock.plugin_call import call_hook
from crossdock.registry import InstalledPlugin, load_plugin
from crossdock.testing import common_conformance
from crossdock.testing.conformance import Check, CheckResult, NotCheckable, Outcome, PluginCase, run_check
from crossdock.testing.world import RankPool
from crossdock.types.capability import Environment, Refusal

PoolOf: TypeAlias = Callable[[int], RankPool]


def _padding() -> tuple[Check, ...]:
    from crossdock.testing.padding_conformance import CHECKS

    return CHECKS


def _dispatcher() -> tuple[Check, ...]:
    from crossdock.testing.dispatcher_conformance import CHECKS

    return CHECKS


def _experts() -> tuple[Check, ...]:
    from crossdock.testing.experts_conformance import CHECKS

    return CHECKS


def _expert_location() -> tuple[Check, ...]:
    from crossdock.testing.picker_conformance import CHECKS

    return CHECKS


def _strategy() -> tuple[Check, ...]:
    from crossdock.testing.strategy_conformance import CHECKS

    return CHECKS


def _attention() -> tuple[Check, ...]:
    from crossdock.testing.attention_conformance import CHECKS

    return CHECKS


def _model() -> tuple[Check, ...]:
    from crossdock.testing.model_conformance import CHECKS

    return CHECKS


def _eplb_algo() -> tuple[Check, ...]:
    from crossdock.testing.eplb_algo_conformance import CHECKS

    return CHECKS


def _rebalance_policy() -> tuple[Check, ...]:
    from crossdock.testing.rebalance_policy_conformance import CHECKS

    return CHECKS


def _observer() -> tuple[Check, ...]:
    from crossdock.testing.observer_conformance import CHECKS

    return CHECKS


SUITES: Mapping[str, Callable[[], tuple[Check, ...]]] = MappingProxyType(
    {
        "padding": _padding,
        "dispatcher": _dispatcher,
        "experts": _experts,
        "strategy": _strategy,
        "attention": _attention,
        "model": _model,
        "expert_location": _expert_location,
        "eplb_algo": _eplb_algo,
        "rebalance_policy": _rebalance_policy,
        "observer": _observer,
    }
)
"""Checks of each point, besides those that hold for any plugin; imported when they are asked for, because some need torch."""
RANK_COUNTS = (1, 2, 4)
"""Numbers of ranks that a dispatcher is asked about."""
DEVICE_POINTS = frozenset({"dispatcher", "experts"})
"""Points whose suites can put their tensors on a GPU; the others are checked on a CPU only."""


def checks_of(point: str) -> tuple[Check, ...]:
    """Everything that is checked of a plugin of this point."""
    own = SUITES[point]() if point in SUITES else ()
    return (*common_conformance.CHECKS, *(_on_this_machine(check) for check in own))


def _on_this_machine(check: Check) -> Check:
    """The check, not made where the plugin does not run on the case's device, or the suite does not."""

    def run(case: PluginCase) -> None:
        if case.device != "cpu" and case.point not in DEVICE_POINTS:
            raise NotCheckable("the suite of this point runs on a CPU only")
        answer = _answer(case)
        if isinstance(answer, Refusal):
            raise NotCheckable(answer.sentence)
        devices: frozenset[str] = getattr(answer, "devices", frozenset({"cpu"}))
        if case.device not in devices:
            raise NotCheckable(f"runs on {', '.join(sorted(devices))} only")
        check.run(case)

    return Check(name=check.name, run=run)


def _answer(case: PluginCase) -> object:
    """What the plugin says of itself on this machine: for one rank, or for the first number of ranks that it does not refuse."""
    answers: list[object] = []
    for ranks in RANK_COUNTS if case.point == "dispatcher" else RANK_COUNTS[:1]:
        env = Environment(
            device=case.device,
            sizes=resolve_sizes(ranks=ranks, attn_dp_size=ranks),
            dtype="float32" if case.device == "cpu" else "bfloat16",
            packages=frozenset(module.name for module in pkgutil.iter_modules()),
            max_rows_per_rank=512,
        )
        hook = f"{case.point}_capabilities"
        answers.append(call_hook(load_plugin(case.point, case.name), hook, options=case.options, env=env))
        if not isinstance(answers[-1], Refusal):
            return answers[-1]
    return answers[0]


@contextmanager
def rank_pools(device: str = "cpu") -> Generator[PoolOf]:
    """Pools of ranks by size, started when they are first asked for and ended with the block; with ``cuda`` a rank has a GPU."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, device=device))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()


def check_plugins(
    plugins: Sequence[InstalledPlugin], report: Callable[[str], None], device: str = "cpu"
) -> tuple[CheckResult, ...]:
    """Every check on every one of these plugins; ``report`` gets a line for each, and the traceback of a failure."""
    results: list[CheckResult] = []
    with rank_pools(device) as pool_of:
        for plugin in plugins:
            case = PluginCase(point=plugin.point, name=plugin.name, pool_of=pool_of, device=device)
            for check in checks_of(plugin.point):
                result = run_check(check, case)
                results.append(result)
                report(f"{result.outcome.value:11} {plugin.point} {plugin.name}: {check.name.replace('_', ' ')}")
                if result.outcome is not Outcome.PASSED:
                    report(result.message)
    return tuple(results)
