"""Extension point ``model``: a model definition, chosen by the checkpoint's ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossdock.hookapi import hookspec

if TYPE_CHECKING:
    from crossdock.types.capability import Environment, ModelCapabilities, Refusal
    from crossdock.types.model import Model, ModelInfo, ModelSpec
    from crossdock.types.parallel import ParallelSizes, RankPlace


@hookspec(firstresult=True)
def make_model(spec: ModelSpec) -> Model | None:
    """First result. Decides, once at start on every rank, how the checkpoint becomes modules with weights and declared ops.

    Args:
        spec: ``config.json`` as found; the lazily read checkpoint; sizes, place and collectives; compute dtype (torch.dtype) and device; the
            attention backend; the parts of the MoE blocks (dispatcher, experts, picker, maps, recorder), None for a dense model.

    Returns:
        A model with its weights loaded: only the slices and experts of this rank were read.

    Declining: None when ``model_type`` is not its own; the start then ends with ``PluginDeclined``.

    Raises:
        CheckpointError: tensors are missing, extra or mis-shaped; lists them all.

    Source: the checkpoint formats of Hugging Face transformers.
    """


@hookspec(firstresult=True)
def model_info(config: Mapping[str, object], sizes: ParallelSizes, place: RankPlace) -> ModelInfo | None:
    """First result. Decides, before weights are loaded and in the frontend too, what a checkpoint is to one rank.

    Args:
        config: the checkpoint's ``config.json`` as found, in either spelling of its fields.
        sizes: widths of both factorisations.
        place: the rank that is asked about; cache sizes and head counts are that rank's.

    Returns:
        Layers, hidden size, vocabulary, context length, cache form, routed experts.

    Declining: None when ``model_type`` or a required field is not its own; the start then ends with ``PluginDeclined``.

    Raises:
        CheckpointError: a field is missing or out of range, or the widths do not divide the model; names size, split and a setting that works.

    Cheap: imports no torch.
    """


@hookspec(firstresult=True)
def model_capabilities(options: Mapping[str, object], env: Environment) -> ModelCapabilities | Refusal | None:
    """First result. Decides, before weights are loaded and in the frontend too, which devices, dtypes and strategies the model runs with.

    Args:
        options: the plugin's own table of the config without ``name``, as read from TOML; host data. The plugin reads it with
            ``crossdock.options.read_options``, which reports unknown keys and wrong values together.
        env: device name, parallel widths, dtype name, installed packages, model facts; host data, no device behind it.

    Returns:
        The capabilities that the object built from the same options will have, or a refusal with code and sentence.

    Declining: None means any strategy on any device.

    Raises:
        ConfigValueError: an option is unknown or has a wrong value.

    Cheap: imports neither torch nor an optional package; runs on a machine without the device.
    """
