"""The command table. A command's module is imported when it is the one that runs, so help and config errors stay fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from cyclopts import App

import crossdock

Loader = Callable[[], Any]


def _serve() -> Any:
    from crossdock.cli.serve import serve

    return serve


def _generate() -> Any:
    from crossdock.cli.generate import generate

    return generate


def _logits() -> Any:
    from crossdock.cli.logits import logits

    return logits


def _plan() -> Any:
    from crossdock.cli.plan import plan

    return plan


def _bench() -> Any:
    from crossdock.cli.bench import bench_app

    return bench_app


def _plugins() -> Any:
    from crossdock.cli.plugins import plugins_app

    return plugins_app


def _config() -> Any:
    from crossdock.cli.config import config_app

    return config_app


def _trace() -> Any:
    from crossdock.cli.trace import trace_app

    return trace_app


def _receipt() -> Any:
    from crossdock.cli.receipt import receipt_app

    return receipt_app


def _env() -> Any:
    from crossdock.cli.env import env

    return env


@attrs.frozen(kw_only=True)
class Command:
    """A first word of the command line. ``load`` gives the function, or the App of a group."""

    help: str
    load: Loader
    takes_familiar_flags: bool = False


COMMANDS: dict[str, Command] = {
    "serve": Command(
        help="Serve a model over HTTP; without MODEL the bundled crossdock-mini.",
        load=_serve,
        takes_familiar_flags=True,
    ),
    "generate": Command(help="Generate tokens for a list of prompts.", load=_generate, takes_familiar_flags=True),
    "logits": Command(
        help="Write the logits of every position of a list of prompts.", load=_logits, takes_familiar_flags=True
    ),
    "plan": Command(help="Plan an expert placement from recorded loads.", load=_plan),
    "bench": Command(help="Benchmarks.", load=_bench),
    "plugins": Command(help="List, check and write plugins.", load=_plugins),
    "config": Command(help="Show, validate and compare configurations.", load=_config),
    "trace": Command(help="Numbers and a picture of recorded timelines.", load=_trace),
    "receipt": Command(help="Compare receipts.", load=_receipt),
    "env": Command(help="What this environment can run, and which optional packages fit.", load=_env),
}


def build_app(words: Sequence[str]) -> App:
    """The application for this command line: the command named first is complete, the others have their help line only."""
    app = App(name="crossdock", help=crossdock.__doc__, version=crossdock.__version__, result_action="return_value")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name != chosen:
            app.command(App(name=name, help=command.help), name=name)
            continue
        loaded = command.load()
        if isinstance(loaded, App):
            app.command(loaded, name=name)
        else:
            app.command(loaded, name=name, help=None)
    return app
