"""Reference pages made from the code: ``python -m crossdock.cli.reference docs`` writes them, a test compares them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

import crossdock.errors
from crossdock.cli.familiar import FAMILIAR_FLAGS, FamiliarFlag
from crossdock.config import Config, ObserverConfig, PluginChoice
from crossdock.config_render import config_tables
from crossdock.errors import CrossdockError
from crossdock.options import option_help
from crossdock.points import POINTS, SPECS, hook_names
from crossdock.registry import installed

MADE_BY = "<!-- made by `python -m crossdock.cli.reference docs`; do not edit -->\n"
OWN_DISTRIBUTION = "crossdock"


def config_page() -> str:
    """Every table and key of the configuration with type, default and help."""
    defaults = Config()
    lines = [
        MADE_BY,
        "# Configuration\n",
        "TOML. Order: defaults, then the file (`--config`), then `--set table.key=value`, then flags; the later wins, also when it repeats",
        "the default. No environment variable changes behaviour. `crossdock config show --resolved` prints every value with its source.\n",
    ]
    for field in attrs.fields(Config):
        value = getattr(defaults, field.name)
        lines.append(f"## [{field.name}]\n")
        if isinstance(value, PluginChoice):
            names = ", ".join(f"`{name}`" for name in _own_plugins(field.name)) or "none yet"
            lines.append(f"`name` (default `{value.name}`) and that plugin's own options. First-party: {names}.\n")
        elif isinstance(value, ObserverConfig):
            lines.append("`names`: a list, default `[]`; options of an observer go into `[observer.<name>]`.\n")
        else:
            lines += ["| key | type | default | |", "|---|---|---|---|"]
            for inner in attrs.fields(type(value)):
                default = config_tables(defaults)[field.name][inner.name]
                shown = _type_text(type(value).__annotations__[inner.name])
                lines.append(f"| `{inner.name}` | {shown} | `{_toml(default)}` | {option_help(inner)} |")
            lines.append("")
    return "\n".join(lines)


def familiar_page() -> str:
    """Flags of other engines and what they are here."""
    lines = [
        MADE_BY,
        "# Familiar flags\n",
        "`serve`, `generate` and `logits` take these flags of other engines where they mean the same; the others end with a sentence that",
        "names ours.\n",
        "| flag | of | here |",
        "|---|---|---|",
    ]
    for flag in FAMILIAR_FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        lines.append(f"| {names} | {flag.engines} | {_meaning(flag)} |")
    return "\n".join([*lines, ""])


def points_page() -> str:
    """Every extension point with its hooks, as the specs state them, and the first-party plugins."""
    lines = [
        MADE_BY,
        "# Extension points and hooks\n",
        "What a hook gets, returns and raises, from the specs in `crossdock.specs`. How to write a plugin: [plugins.md](plugins.md).\n",
    ]
    for point in POINTS:
        lines.append(f"## {point}\n")
        lines.append(f"{(SPECS[point].__doc__ or '').strip()}\n")
        names = ", ".join(f"`{name}`" for name in _own_plugins(point)) or "none yet"
        lines.append(
            f"First-party plugins: {names}. Conformance: `crossdock plugins check DISTRIBUTION --point {point}`.\n"
        )
        for hook in hook_names(point):
            function = getattr(SPECS[point], hook)
            signature = inspect.signature(function)
            arguments = ", ".join(f"{name}: {parameter.annotation}" for name, parameter in signature.parameters.items())
            lines += [f"### `{hook}`\n", "```text", f"{hook}({arguments}) -> {signature.return_annotation}", "```\n"]
            lines += ["```text", inspect.getdoc(function) or "", "```\n"]
    return "\n".join(lines)


def errors_page() -> str:
    """The exception tree, with exit codes."""
    lines = [
        MADE_BY,
        "# Errors\n",
        "A message is one sentence: what was asked, what was found, what to do. The command line prints it on one line of stderr and exits with",
        "2 (usage and configuration) or 1 (run time); the server answers with the HTTP status of the request error.\n",
        "| class | exit code | |",
        "|---|---|---|",
    ]
    for name, value in vars(crossdock.errors).items():
        if inspect.isclass(value) and issubclass(value, CrossdockError):
            first_line = (inspect.getdoc(value) or "").splitlines()[0]
            lines.append(f"| `{name}` | {value.exit_code} | {first_line} |")
    tree = (crossdock.errors.__doc__ or "").partition("::\n\n")[2]
    return "\n".join([*lines, "", "```text", inspect.cleandoc(tree), "```", ""])


PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_page,
    "familiar-flags.md": familiar_page,
    "points.md": points_page,
    "errors.md": errors_page,
}


def _own_plugins(point: str) -> tuple[str, ...]:
    return tuple(plugin.name for plugin in installed(point) if plugin.distribution == OWN_DISTRIBUTION)


def _type_text(annotation: str) -> str:
    """``Literal['a', 'b']`` as its words."""
    known = {
        "Dtype": "`auto`, `float32`, `bfloat16`",
        "str": "string",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
    }
    if annotation.startswith("Literal["):
        words = annotation.removeprefix("Literal[").removesuffix("]")
        return ", ".join(f"`{word.strip().strip(chr(34)).strip(chr(39))}`" for word in words.split(","))
    return known.get(annotation, annotation)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _meaning(flag: FamiliarFlag) -> str:
    if flag.ours:
        return f"`--set {flag.ours}=VALUE`"
    if flag.is_switch:
        return f"`{' '.join(flag.becomes[''])}`"
    if flag.becomes:
        return "; ".join(f"`{value}`: `{' '.join(words)}`" for value, words in flag.becomes.items())
    return f"refused: {flag.advice}"


def main(folder: Path) -> None:
    """Writes all pages into ``folder``."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
