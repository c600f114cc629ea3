"""Reads ``config.json`` in either spelling of its fields; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from crossdock.errors import CheckpointError


@attrs.frozen
class ConfigReader:
    """Typed access to a checkpoint's config. Several names of one field are its spellings; the first that is set wins."""

    config: Mapping[str, Any]

    def integer(self, name: str, *others: str, default: int | None = None) -> int:
        return int(self._value((name, *others), int, default))

    def number(self, name: str, *others: str, default: float | None = None) -> float:
        return float(self._value((name, *others), (int, float), default))

    def flag(self, name: str, *others: str, default: bool) -> bool:
        return bool(self._value((name, *others), bool, default))

    def text(self, name: str, *others: str, default: str | None = None) -> str:
        return str(self._value((name, *others), str, default))

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.config.get(name) is not None else None

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, or one; empty when absent."""
        value = self.config.get(name)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) for item in found):
            raise self.wrong(name, f"must be an integer or a list of them, found {value!r}")
        return tuple(found)

    def wrong(self, name: str, rule: str) -> CheckpointError:
        """The error for a field that breaks a rule."""
        return CheckpointError(f"config.json of a {self.config.get('model_type')} checkpoint: {name} {rule}")

    def _value(self, names: tuple[str, *tuple[str, ...]], kinds: type | tuple[type, ...], default: Any) -> Any:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise self.wrong(name, f"is {value!r}, which has the wrong type")
            return value
        if default is None:
            others = f" (also spelled {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.wrong(names[0], f"is missing{others}")
        return default


@attrs.frozen(kw_only=True)
class DecoderFields:
    """Fields that every decoder family has."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]


def read_decoder_fields(reader: ConfigReader) -> DecoderFields:
    """The common fields of a config.

    Raises:
        CheckpointError: a field is missing or has the wrong type, or the activation is not SwiGLU's.
    """
    activation = reader.text("hidden_act", default="silu")
    if activation != "silu":
        raise reader.wrong("hidden_act", f"is {activation!r}; only 'silu' is implemented")
    return DecoderFields(
        model_type=reader.text("model_type"),
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        num_heads=reader.integer("num_attention_heads"),
        max_positions=reader.integer("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        tie_embeddings=reader.flag("tie_word_embeddings", default=False),
        eos_token_ids=reader.integers("eos_token_id"),
    )


def refuse_sliding_window(reader: ConfigReader, window: int | None, max_positions: int) -> None:
    """A window that can cut something off is refused; one as long as the context changes nothing.

    Raises:
        CheckpointError: names the window.
    """
    if window is not None and window < max_positions:
        raise reader.wrong(
            "sliding_window",
            f"is {window}, below the context of {max_positions}; sliding-window attention is not implemented",
        )
