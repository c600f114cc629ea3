"""Chat messages to prompt text: the checkpoint's Jinja template in an immutable sandbox, with the names templates expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from crossdock.errors import RequestError

NO_TEMPLATE = (
    "messages: this model has no chat template (no chat_template in tokenizer_config.json and no chat_template.jinja), "
    "so chat completions cannot be built; use /v1/completions with a prompt"
)


@attrs.frozen(kw_only=True, eq=False)
class ChatTemplate:
    """A compiled template, or the reason why there is none."""

    _template: jinja2.Template | None = attrs.field(alias="template")
    problem: str | None
    """One sentence for the start-up warning and for each refused chat request; None when the template is usable."""
    _special_tokens: Mapping[str, str] = attrs.field(alias="special_tokens")
    source: str | None = None
    takes_tools: bool = False
    """The template reads ``tools``."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt text.

        Raises:
            RequestError: there is no usable template, or the template refuses these messages.
        """
        if self._template is None:
            raise RequestError(self.problem or NO_TEMPLATE, field="messages")
        variables: dict[str, Any] = {**self._special_tokens, **arguments}
        variables.update(messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the chat template refuses them: {error}", field="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            message = f"messages: the chat template fails on them: {type(error).__name__}: {error}"
            raise RequestError(message, field="messages") from error


def load_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
    """The template of a checkpoint: ``chat_template.jinja`` before ``chat_template`` of ``tokenizer_config.json``."""
    special_tokens = {
        name: special_token_text(value)
        for name, value in tokenizer_config.items()
        if name.endswith("_token") and special_token_text(value)
    }
    source = _template_source(folder, tokenizer_config)
    if source is None:
        return ChatTemplate(template=None, problem=NO_TEMPLATE, special_tokens=special_tokens)
    environment = _environment()
    try:
        template = environment.from_string(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        problem = f"messages: this model's chat template has an error in line {getattr(error, 'lineno', '?')}: {error}"
        return ChatTemplate(template=None, problem=problem, special_tokens=special_tokens, source=source)
    return ChatTemplate(
        template=template, problem=None, special_tokens=special_tokens, source=source, takes_tools="tools" in names
    )


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def special_token_text(value: object) -> str:
    """A special token of ``tokenizer_config.json``, which is text or an object with ``content``; else empty."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(names)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which would change prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(form)
