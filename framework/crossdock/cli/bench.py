"""``crossdock bench``: one sub-command a benchmark."""

from __future__ import annotations

from cyclopts import App

from crossdock.cli.bench_plan import bench_plan
from crossdock.cli.bench_serve import bench_serve

bench_app = App(name="bench", help="Benchmarks.")
bench_app.command(bench_plan, name="plan")
bench_app.command(bench_serve, name="serve")
