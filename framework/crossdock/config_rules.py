"""Rules between values of the configuration, and the widths that zeros stand for."""

from __future__ import annotations

from crossdock.config import Config, ParallelConfig
from crossdock.errors import ConfigValueError
from crossdock.groups import resolve_sizes
from crossdock.types.parallel import ParallelSizes


def parallel_sizes(parallel: ParallelConfig) -> ParallelSizes:
    """Resolved widths of ``[parallel]``.

    Raises:
        ConfigValueError: the widths do not multiply to the ranks; with the numbers.
    """
    return resolve_sizes(
        ranks=parallel.ranks,
        attn_dp_size=parallel.attn_dp_size,
        attn_cp_size=parallel.attn_cp_size,
        attn_tp_size=parallel.attn_tp_size,
        moe_dp_size=parallel.moe_dp_size,
        moe_ep_size=parallel.moe_ep_size,
        moe_tp_size=parallel.moe_tp_size,
    )


def rule_problems(config: Config, *, skip: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Every rule between values that does not hold; rules that read a table in ``skip`` are not asked."""
    rules = (
        ({"parallel"}, _width_problems),
        ({"scheduler"}, _scheduler_problems),
        ({"launch"}, _launch_problems),
        ({"launch", "parallel"}, _machine_problems),
        ({"eplb"}, _eplb_problems),
    )
    return tuple(problem for tables, rule in rules if not tables & skip for problem in rule(config))


def physical_experts(config: Config, num_logical_experts: int, moe_ep_size: int) -> int:
    """Slots over all ranks.

    Raises:
        ConfigValueError: fewer slots than experts, not divisible by ``moe_ep_size``, or more than ``eplb.max_replicas`` copies of all
            experts fill; gives the smallest number that works.
    """
    eplb = config.eplb
    slots = eplb.slots or num_logical_experts + eplb.num_redundant_experts
    smallest = -(-max(slots, num_logical_experts) // moe_ep_size) * moe_ep_size
    advice = (
        f"the smallest that works is eplb.slots = {smallest} (num_redundant_experts = {smallest - num_logical_experts})"
    )
    if slots < num_logical_experts:
        raise ConfigValueError(
            [f"[eplb] slots: {slots} is fewer than the model's {num_logical_experts} experts; {advice}"]
        )
    if slots % moe_ep_size:
        raise ConfigValueError(
            [
                f"[eplb] slots: {slots} physical experts do not divide over moe_ep_size = {moe_ep_size} ranks"
                f" ({num_logical_experts} logical experts); {advice}"
            ]
        )
    if eplb.max_replicas and slots > eplb.max_replicas * num_logical_experts:
        raise ConfigValueError(
            [
                f"[eplb] max_replicas: {num_logical_experts} experts with {eplb.max_replicas} replicas at most do not fill {slots} slots;"
                f" set it to {-(-slots // num_logical_experts)} or more, or to 0 for no limit"
            ]
        )
    return slots


def _width_problems(config: Config) -> list[str]:
    parallel = config.parallel
    try:
        sizes = parallel_sizes(parallel)
    except ConfigValueError as error:
        return list(error.problems)
    if parallel.dense_tp_size in (0, 1, sizes.attn_tp_size):
        return []
    return [
        f"[parallel] dense_tp_size: must be 0, 1 or attn_tp_size = {sizes.attn_tp_size}, found {parallel.dense_tp_size}"
    ]


def _scheduler_problems(config: Config) -> list[str]:
    limits = config.scheduler
    problems: list[str] = []
    if limits.max_running_requests > limits.max_step_tokens:
        problems.append(
            f"[scheduler] max_running_requests: {limits.max_running_requests} is more than max_step_tokens ="
            f" {limits.max_step_tokens}; each generating request takes one row of a step"
        )
    if limits.kv_tokens and limits.kv_tokens < limits.page_tokens:
        problems.append(
            f"[scheduler] kv_tokens: {limits.kv_tokens} is less than one page of {limits.page_tokens} tokens; 0 derives it"
        )
    return problems


def _launch_problems(config: Config) -> list[str]:
    launch = config.launch
    problems: list[str] = []
    if launch.node_rank >= launch.nnodes:
        problems.append(
            f"[launch] node_rank: {launch.node_rank} is not one of the {launch.nnodes} machines (0 to {launch.nnodes - 1})"
        )
    if launch.nnodes > 1 and launch.launcher == "local" and not launch.rdzv_endpoint:
        problems.append("[launch] rdzv_endpoint: needed for more than one machine; give host:port of machine 0")
    return problems


def _machine_problems(config: Config) -> list[str]:
    ranks, nnodes = config.parallel.ranks, config.launch.nnodes
    if ranks % nnodes == 0:
        return []
    return [f"[parallel] ranks: {ranks} ranks do not divide over launch.nnodes = {nnodes} machines"]


def _eplb_problems(config: Config) -> list[str]:
    eplb = config.eplb
    problems: list[str] = []
    if eplb.slots and eplb.num_redundant_experts:
        problems.append(
            f"[eplb] slots: {eplb.slots} slots and num_redundant_experts = {eplb.num_redundant_experts} say the same thing twice;"
            " keep one"
        )
    if eplb.expert_share > 1:
        problems.append(f"[eplb] expert_share: a part of a step is at most 1, found {eplb.expert_share:g}")
    if not eplb.init_location:
        problems.append("[eplb] init_location: must be trivial, a file or an inline JSON text, found nothing")
    return problems
