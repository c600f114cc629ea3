"""The configuration as attrs values: one class a TOML table (DESIGN section 11). Plain data; torch is never imported."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import attrs

from crossdock.options import option

Dtype = Literal["auto", "float32", "bfloat16"]
Number = TypeVar("Number", int, float)


def at_least(least: Number) -> Any:
    """A validator: the value is ``least`` or more, and a finite number."""

    def check(_: Any, field: attrs.Attribute[Any], value: Number) -> None:
        if not least <= value < float("inf"):
            raise ValueError(
                f"{field.name} must be at least {least}{'' if value < least else ' and finite'}, found {value}"
            )

    return check


def _port(_: Any, field: attrs.Attribute[int], value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"{field.name} must be from 0 to 65535 (0 takes a free one), found {value}")


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """``[checkpoint]``: which weights, in which form."""

    path: str = option("folder of a Hugging Face checkpoint; empty for the bundled crossdock-mini", default="")
    dtype: Dtype = option("compute dtype; auto takes the checkpoint's", default="auto")
    load_format: Literal["auto", "random"] = option(
        "random makes seeded weights from config.json alone", default="auto"
    )
    seed: int = option("seed of random weights", default=0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """``[parallel]``: both factorisations of the ranks; 0 derives (attn_dp 1, attn_tp the rest, moe_ep all ranks, moe_tp 1)."""

    ranks: int = option("processes of the job", default=1, validator=at_least(1))
    attn_dp_size: int = option("attention replicas", default=0, validator=at_least(0))
    attn_tp_size: int = option("ranks that share one replica's attention", default=0, validator=at_least(0))
    attn_cp_size: int = option("context-parallel width; above 1 is refused", default=0, validator=at_least(0))
    moe_dp_size: int = option("copies of all experts; above 1 is refused", default=0, validator=at_least(0))
    moe_ep_size: int = option("ranks that experts are split over", default=0, validator=at_least(0))
    moe_tp_size: int = option("ranks that share each expert", default=0, validator=at_least(0))
    dense_tp_size: int = option(
        "tensor split of dense feed-forward layers: 1, attn_tp_size, or 0 for all ranks on full rows",
        default=0,
        validator=at_least(0),
    )


@attrs.frozen(kw_only=True)
class LaunchConfig:
    """``[launch]``: how the rank processes start and end."""

    launcher: Literal["local", "torchrun", "ray"] = option("who starts the ranks", default="local")
    device: Literal["cpu", "cuda"] = option("device of every rank", default="cpu")
    ranks_per_gpu: int = option("ranks that share a GPU, to try a layout on few", default=1, validator=at_least(1))
    on_dead_rank: Literal["stop_all", "survive"] = option("what a dead rank means for the others", default="stop_all")
    nnodes: int = option("machines", default=1, validator=at_least(1))
    node_rank: int = option("number of this machine", default=0, validator=at_least(0))
    rdzv_endpoint: str = option("host:port of machine 0, for more than one machine", default="")
    link_key_file: str = option(
        "file with 32 characters or more of secret, equal on all machines; empty: the rendezvous sends one", default=""
    )
    exchange: Literal["auto", "shm", "gloo"] = option("transport of the step records", default="auto")
    step_deadline_s: float = option(
        "a step waits this long for a rank, then ends naming it", default=60.0, validator=at_least(0.1)
    )
    start_timeout_s: float = option("ranks must be ready within", default=600.0, validator=at_least(1.0))
    row_invariant: Literal["auto", "on", "off"] = option(
        "on: a row of a step has the same bits whatever rows are beside it, so that no strategy, batch or chunk changes a result (CPU, "
        "float32); auto: on where C kernels take the model's sizes, and for tiny models",
        default="auto",
    )
    threads_per_rank: int = option("compute threads of a rank; 0 shares the cores", default=0, validator=at_least(0))
    log_folder: str = option("one log file a rank here; empty logs to stderr", default="")


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """``[scheduler]``: limits of one replica."""

    max_running_requests: int = option("sequences in a step", default=64, validator=at_least(1))
    max_step_tokens: int = option("rows in a step", default=1024, validator=at_least(1))
    chunk_tokens: int = option("prompt rows of one sequence in a step", default=512, validator=at_least(1))
    page_tokens: int = option("tokens of a KV page", default=16, validator=at_least(1))
    kv_tokens: int = option(
        "tokens in the KV pool of a replica; 0 derives it from the limits", default=0, validator=at_least(0)
    )
    max_sequence_tokens: int = option(
        "prompt and answer together; 0 takes the model's", default=0, validator=at_least(0)
    )
    max_queued_requests: int = option("waiting requests before 429", default=1024, validator=at_least(1))
    prefix_cache: bool = option("reuse KV pages of equal prefixes", default=True)
    depth: Literal["auto", "0", "1"] = option(
        "1: a step is launched before the tokens of the one before it are on the host; auto: 1 on a GPU, 0 on a CPU",
        default="auto",
    )
    graphs: Literal["auto", "off"] = option(
        "auto: decode steps are captured in device graphs where every plugin can be", default="auto"
    )
    graph_prefill_rows: int = option("rows of the largest captured prompt step", default=1024, validator=at_least(0))


@attrs.frozen(kw_only=True)
class ServerConfig:
    """``[server]``: the HTTP frontend."""

    host: str = option("address to bind", default="127.0.0.1")
    port: int = option("port to bind; 0 takes a free one", default=8000, validator=_port)
    served_model_name: str = option("model id in the API; empty takes the folder's name", default="")
    api_key_file: str = option("file with one accepted key a line; empty asks for none", default="")
    router: Literal["round_robin", "least_requests", "least_tokens", "prefix_affinity"] = option(
        "how requests are spread over replicas", default="least_tokens"
    )
    receipt_file: str = option("where the receipt goes when the server ends in order; empty writes none", default="")
    max_body_mib: int = option("largest request body", default=64, validator=at_least(1))
    drain_s: float = option("after SIGTERM requests may finish for this long", default=30.0, validator=at_least(0.0))
    stuck_after_s: float = option(
        "a replica without progress for this long is unhealthy", default=60.0, validator=at_least(0.1)
    )


@attrs.frozen(kw_only=True)
class EplbConfig:
    """``[eplb]``: expert placement."""

    enabled: bool = option("rebalance while serving", default=False)
    slots: int = option("physical experts in all; 0 gives every expert one", default=0, validator=at_least(0))
    num_redundant_experts: int = option(
        "physical minus logical experts, instead of slots", default=0, validator=at_least(0)
    )
    init_location: str = option("trivial, or a file with a placement or a recorded load", default="trivial")
    interval: int = option("recorded passes between two decisions", default=1000, validator=at_least(1))
    max_replicas: int = option(
        "most replicas of one expert; 0 allows all spare slots", default=0, validator=at_least(0)
    )
    max_step_bytes: int = option(
        "bytes that a rank sends, and receives, for a rebalance between two steps",
        default=1 << 24,
        validator=at_least(1),
    )
    experts_from: Literal["peers", "checkpoint"] = option(
        "where a rank gets experts that it does not hold; peers: other ranks; checkpoint: the files, by way of host memory",
        default="peers",
    )
    transport: Literal["auto", "peer", "nccl", "gloo"] = option(
        "of experts that move; peer: copies into the memory of other GPUs of the machine; gloo: by way of host memory; "
        "auto: peer or else nccl between GPUs, shared memory or else gloo between CPUs",
        default="auto",
    )
    plan_in: Literal["auto", "thread", "process"] = option(
        "where plans are made; process: one beside each rank, so that steps do not share an interpreter with the planner; "
        "auto: process beside GPUs, thread beside CPUs",
        default="auto",
    )
    late_s: float = option(
        "a plan, or a slice of experts, that takes longer is given up and tried again at a later decision",
        default=60.0,
        validator=at_least(0.01),
    )
    expert_share: float = option(
        "part of a step that experts of the fullest rank take, for the predicted gain",
        default=0.5,
        validator=at_least(0.0),
    )
    link_gbps: float = option(
        "10^9 bits a second between two ranks, for the price of a plan", default=10.0, validator=at_least(0.001)
    )
    canary: bool = option("debug: expert numbers travel with the tensors and are checked on arrival", default=False)


@attrs.frozen(kw_only=True)
class RecorderConfig:
    """``[recorder]``: expert load."""

    mode: Literal["off", "stat", "stat_approx", "per_pass", "per_token"] = option(
        "what is kept of a pass", default="off"
    )
    buffer_steps: int = option("passes in the ring buffer", default=1000, validator=at_least(1))
    report: Literal["off", "log", "prometheus", "both"] = option("where balancedness is reported", default="off")
    report_every: int = option("recorded passes between two reports", default=100, validator=at_least(1))


@attrs.frozen(kw_only=True)
class PluginChoice:
    """A point's table: the plugin's name and, raw, that plugin's own options."""

    name: str
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])


@attrs.frozen(kw_only=True)
class ObserverConfig:
    """``[observer]``: the named observers; each has its options in a table of its own."""

    names: tuple[str, ...] = ()
    options: dict[str, dict[str, Any]] = attrs.field(factory=dict[str, dict[str, Any]])


def _choice(name: str) -> Any:
    return attrs.field(factory=lambda: PluginChoice(name=name))


@attrs.frozen(kw_only=True)
class Config:
    """Everything that a rank is started from; equal on all ranks but for ``launch.node_rank``."""

    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    launch: LaunchConfig = attrs.field(factory=LaunchConfig)
    scheduler: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    server: ServerConfig = attrs.field(factory=ServerConfig)
    eplb: EplbConfig = attrs.field(factory=EplbConfig)
    recorder: RecorderConfig = attrs.field(factory=RecorderConfig)
    padding: PluginChoice = _choice("cost")
    dispatcher: PluginChoice = _choice("allgatherv")
    experts: PluginChoice = _choice("auto")
    strategy: PluginChoice = _choice("sequential")
    expert_location: PluginChoice = _choice("auto")
    eplb_algo: PluginChoice = _choice("crossdock")
    rebalance_policy: PluginChoice = _choice("interval")
    attention: PluginChoice = _choice("auto")
    observer: ObserverConfig = attrs.field(factory=ObserverConfig)


CHOICE_POINTS = (
    "padding",
    "dispatcher",
    "experts",
    "strategy",
    "expert_location",
    "eplb_algo",
    "rebalance_policy",
    "attention",
)
"""Points that a table of the config chooses by name."""
AUTO = "auto"
"""Name that lets the core choose, for experts, expert_location and attention."""
