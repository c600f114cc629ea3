"""``crossdock bench``: one sub-command a benchmark."""

from __future__ import annotations

from cyclopts import App

from crossdock.cli.bench_plan import bench_plan

bench_app = App(name="bench", help="Benchmarks.")
bench_app.command(bench_plan, name="plan")
