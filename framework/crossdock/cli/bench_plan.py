"""``crossdock bench plan``: planners side by side on recorded loads."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from crossdock.errors import ConfigValueError, LoadFileError
from crossdock.placement_io.load_files import read_load
from crossdock.planning import read_algo, read_topology, score_planner, windows

_LONG_PLANS = 20


def bench_plan(
    *,
    trace: Annotated[tuple[str, ...], Parameter(negative="")],
    config: Annotated[tuple[str, ...], Parameter(negative="")],
    algo: Annotated[tuple[str, ...], Parameter(negative="")] = ("crossdock",),
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    window: int = 1,
    max_windows: int | None = None,
    history: int = 1,
    chain: Annotated[bool, Parameter(negative="")] = False,
    repeat: int = 3,
    out: Path | None = None,
) -> None:
    """Time and judge planners; prints a JSON list, one object for each trace, config and planner.

    Milliseconds are thread CPU time. Plan i is made on window i; "next" is window i + 1.

    Parameters
    ----------
    trace
        File with expert loads; may be repeated.
    config
        SLOTS:GPUS:NODES:GROUPS, SLOTS being the total; may be repeated.
    algo
        Planner, as NAME or NAME:key=value,key=value; may be repeated.
    option
        One option for all planners as key=value; may be repeated.
    window
        Steps that are summed to a window.
    max_windows
        Plans at most.
    history
        Windows that the planner gets as steps, for its forecast.
    chain
        Give each plan to the next one as the placement in force, so that planners that mind moves start from it.
    repeat
        Timed calls a plan.
    out
        File for the same JSON.
    """
    least = {"--history": history, "--repeat": repeat, "--max-windows": 1 if max_windows is None else max_windows}
    problems = [f"{name}: must be at least 1, found {value}" for name, value in least.items() if value < 1]
    if problems:
        raise ConfigValueError(problems)
    topologies = [(text, read_topology(text)) for text in config]
    choices = [read_algo(spec, option) for spec in algo]
    traces = [(name, windows(read_load([name]), window)) for name in trace]
    if max_windows is not None:
        traces = [(name, parts[: max_windows + 1]) for name, parts in traces]
    plans = sum(max(1, len(parts) - 1) for _, parts in traces) * len(topologies) * len(choices)
    rows: list[dict[str, object]] = []
    with _progress(plans) as step:
        for name, parts in traces:
            for text, topology in topologies:
                for choice in choices:
                    score = score_planner(
                        choice.make(), topology, parts, history=history, chain=chain, repeat=repeat, progress=step
                    )
                    rows.append({"trace": name, "algo": choice.spelled, "config": text, **attrs.asdict(score)})
    text = json.dumps(rows, indent=1)
    if out is not None:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise LoadFileError(f"{out}: cannot be written ({error.strerror or error})") from error
    print(text)


@contextlib.contextmanager
def _progress(plans: int) -> Generator[Callable[[], None]]:
    """A progress bar over plans on a terminal, when there are many."""
    if plans < _LONG_PLANS or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("plans", total=plans)
        yield lambda: bar.advance(task)
