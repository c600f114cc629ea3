"""Typed entry to the ``model`` point, which the checkpoint's ``model_type`` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from crossdock.checkpoint_names import UniformCheckpoint, check_tensors
from crossdock.errors import CheckpointError, PluginDeclined, UnknownPlugin, WrongPluginResult
from crossdock.plugin_call import build, call_hook
from crossdock.registry import LoadedPlugin, load_plugin
from crossdock.types.model import Model, ModelInfo, ModelSpec
from crossdock.types.parallel import ParallelSizes, RankPlace


def model_info(config: Mapping[str, Any], sizes: ParallelSizes, place: RankPlace) -> ModelInfo:
    """Facts of a checkpoint on one rank, from ``config.json`` alone; imports no torch.

    Raises:
        CheckpointError: no plugin for its ``model_type``, a field is missing or out of range, or the widths do not divide the model.
        PluginError: the plugin cannot be loaded or declines.
    """
    plugin = _plugin_for(config)
    info = call_hook(plugin, "model_info", config=config, sizes=sizes, place=place)
    if info is None:
        raise PluginDeclined(
            f"model plugin {plugin.name!r} declined a checkpoint of model_type {config.get('model_type')!r}"
        )
    if not isinstance(info, ModelInfo):
        raise WrongPluginResult(
            f"model plugin {plugin.name!r}: model_info returned a {type(info).__name__}, not a ModelInfo"
        )
    return info


def make_model(spec: ModelSpec) -> Model:
    """The model of a checkpoint with this rank's weights loaded.

    The plugin gets the checkpoint under the names of ``ModelInfo.tensors``, after every header was compared with them.

    Raises:
        CheckpointError: tensors are missing, extra or mis-shaped; lists them all.
        PluginError: the plugin cannot be loaded, declines, or returns an object without the protocol's methods.
    """
    info = model_info(spec.config, spec.sizes, spec.place)
    checkpoint = UniformCheckpoint(spec.checkpoint, info.renames)
    if info.tensors:
        check_tensors(checkpoint, info)
    model: Model = build(_plugin_for(spec.config), Model, spec=attrs.evolve(spec, checkpoint=checkpoint))
    return model


def _plugin_for(config: Mapping[str, Any]) -> LoadedPlugin:
    name = config.get("model_type")
    if not isinstance(name, str):
        raise CheckpointError("the checkpoint's config.json has no model_type; it chooses the model plugin")
    try:
        return load_plugin("model", name)
    except UnknownPlugin as error:
        raise CheckpointError(f"checkpoints of model_type {name!r} are not served: {error}") from error
