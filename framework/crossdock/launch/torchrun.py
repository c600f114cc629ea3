"""The environment that torch.distributed's agent (and schedulers that imitate it) gives each rank."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from crossdock.errors import ConfigValueError

_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")


@attrs.frozen(kw_only=True)
class TorchrunEnvironment:
    """This process's place in a job that somebody else started."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    master_addr: str
    master_port: int
    agent_hosts_store: bool
    """torchrun's agent keeps a store on the master port; plain schedulers leave that to rank 0."""
    run_id: str
    attempt: int
    """How often the agent has restarted the job."""


def read_torchrun_environment(environment: Mapping[str, str], *, expected_ranks: int) -> TorchrunEnvironment:
    """The place that the variables describe.

    Raises:
        ConfigValueError: a variable is absent or no number, or the job has another size than ``parallel.ranks``.
    """
    problems = [f"{name} is not set" for name in (*_NUMBERS, "MASTER_ADDR") if not environment.get(name)]
    problems += [
        f"{name} must be a number, found {environment[name]!r}"
        for name in _NUMBERS
        if environment.get(name) and not environment[name].isdecimal()
    ]
    if problems:
        hint = "launch.launcher torchrun needs torchrun's variables; start with torchrun --nproc-per-node N -m crossdock serve"
        raise ConfigValueError([f"{hint}: {', '.join(problems)}"])
    ranks = int(environment["WORLD_SIZE"])
    if ranks != expected_ranks:
        raise ConfigValueError(
            [f"parallel.ranks: {expected_ranks} configured, torchrun started {ranks}; make them equal"]
        )
    return TorchrunEnvironment(
        rank=int(environment["RANK"]),
        ranks=ranks,
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        local_ranks=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        agent_hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environment.get("TORCHELASTIC_RUN_ID", "none"),
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
