"""The rope of a config, with a checkpoint error instead of a bare one; torch is not imported."""

from __future__ import annotations

from crossdock.ops.rope_spec import RopeSpec, read_rope

from crossdock_models._shared.config_fields import ConfigReader


def read_rope_fields(reader: ConfigReader, dim: int, default_theta: float = 10000.0) -> RopeSpec:
    """The rope of ``dim`` rotated dimensions.

    Raises:
        CheckpointError: an unknown kind, a scaled kind without factor, or an odd dimension.
    """
    if dim % 2:
        raise reader.wrong("head_dim", f"gives {dim} rotated dimensions; they come in pairs")
    try:
        return read_rope(reader.config, dim, default_theta)
    except ValueError as error:
        raise reader.wrong("rope_parameters", f"cannot be used: {error}") from error
