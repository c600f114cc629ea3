"""Flags that stand for values of the configuration, shared by the commands that run a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import attrs
from cyclopts import CoercionError, Parameter, Token

from crossdock.config_load import LoadedConfig, file_layer, flag_layers, load_config, set_layer

PATHS = {
    "ranks": ("--ranks", "parallel.ranks"),
    "attn_dp": ("--attn-dp", "parallel.attn_dp_size"),
    "attn_tp": ("--attn-tp", "parallel.attn_tp_size"),
    "attn_cp": ("--attn-cp", "parallel.attn_cp_size"),
    "moe_dp": ("--moe-dp", "parallel.moe_dp_size"),
    "moe_ep": ("--moe-ep", "parallel.moe_ep_size"),
    "moe_tp": ("--moe-tp", "parallel.moe_tp_size"),
    "padding": ("--padding", "padding.name"),
    "dispatcher": ("--dispatcher", "dispatcher.name"),
    "experts": ("--experts", "experts.name"),
    "strategy": ("--strategy", "strategy.name"),
    "expert_location": ("--expert-location", "expert_location.name"),
    "attention": ("--attention", "attention.name"),
    "dtype": ("--dtype", "checkpoint.dtype"),
    "load_format": ("--load-format", "checkpoint.load_format"),
    "device": ("--device", "launch.device"),
    "host": ("--host", "server.host"),
    "port": ("--port", "server.port"),
    "served_model_name": ("--served-model-name", "server.served_model_name"),
    "nnodes": ("--nnodes", "launch.nnodes"),
    "node_rank": ("--node-rank", "launch.node_rank"),
    "rdzv_endpoint": ("--rdzv-endpoint", "launch.rdzv_endpoint"),
    "launcher": ("--launcher", "launch.launcher"),
}
"""Field of ``ConfigFlags`` -> (spelling, dotted path in the config)."""


def whole_number(_: type[int], tokens: Sequence[Token]) -> int:
    """A converter that takes no 1.5: the library's own rounds it."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise CoercionError(token=tokens[0], target_type=int) from None


def _flag(help: str) -> Parameter:
    return Parameter(help=help)


def _count(help: str) -> Parameter:
    return Parameter(help=help, converter=whole_number)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class ConfigFlags:
    """Values that win over the file. Every other key of the configuration is reached with ``--set``."""

    config: Annotated[Path | None, _flag("TOML file with the configuration.")] = None
    set_: Annotated[
        tuple[str, ...],
        Parameter(name="--set", negative="", help="One value as table.key=value; may be repeated; wins over the file."),
    ] = ()
    ranks: Annotated[int | None, _count("Processes of the job.")] = None
    attn_dp: Annotated[int | None, _count("Attention replicas.")] = None
    attn_tp: Annotated[int | None, _count("Ranks that share one replica's attention.")] = None
    attn_cp: Annotated[int | None, Parameter(show=False, converter=whole_number)] = None
    moe_dp: Annotated[int | None, Parameter(show=False, converter=whole_number)] = None
    moe_ep: Annotated[int | None, _count("Ranks that experts are split over.")] = None
    moe_tp: Annotated[int | None, _count("Ranks that share each expert.")] = None
    padding: Annotated[str | None, _flag("Padding policy.")] = None
    dispatcher: Annotated[str | None, _flag("How tokens travel to experts.")] = None
    experts: Annotated[str | None, _flag("Grouped expert computation.")] = None
    strategy: Annotated[str | None, _flag("Order and overlap of operations.")] = None
    expert_location: Annotated[str | None, _flag("Which replica of an expert takes a token.")] = None
    attention: Annotated[str | None, _flag("Attention backend.")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16"] | None, _flag("Compute dtype.")] = None
    load_format: Annotated[Literal["auto", "random"] | None, Parameter(show=False)] = None
    device: Annotated[Literal["cpu", "cuda"] | None, _flag("Device of every rank.")] = None
    host: Annotated[str | None, _flag("Address to bind.")] = None
    port: Annotated[int | None, _count("Port to bind; 0 takes a free one.")] = None
    served_model_name: Annotated[str | None, _flag("Model id in the API.")] = None
    nnodes: Annotated[int | None, _count("Machines.")] = None
    node_rank: Annotated[int | None, _count("Number of this machine.")] = None
    rdzv_endpoint: Annotated[str | None, _flag("host:port of machine 0.")] = None
    launcher: Annotated[Literal["local", "torchrun", "ray"] | None, _flag("Who starts the ranks.")] = None

    def load(self, model: str | Path | None = None) -> LoadedConfig:
        """The configuration of file, ``--set`` and flags; ``model`` is the positional checkpoint folder.

        Raises:
            ConfigFileError, ConfigValueError: as ``crossdock.config_load``.
        """
        given: dict[str, tuple[str, object]] = {}
        if model is not None:
            given["MODEL"] = ("checkpoint.path", str(model))
        for field, (spelling, path) in PATHS.items():
            value = getattr(self, field)
            if value is not None:
                given[spelling] = (path, value)
        layers = [file_layer(self.config)] if self.config is not None else []
        return load_config([*layers, set_layer(self.set_), *flag_layers(given)])
