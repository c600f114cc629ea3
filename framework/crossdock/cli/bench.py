"""``crossdock bench``: one sub-command a benchmark."""

from __future__ import annotations

from cyclopts import App

from crossdock.cli.bench_engine import bench_latency, bench_throughput
from crossdock.cli.bench_parts import bench_dispatch, bench_experts
from crossdock.cli.bench_plan import bench_plan
from crossdock.cli.bench_serve import bench_serve

bench_app = App(name="bench", help="Benchmarks.")
bench_app.command(bench_dispatch, name="dispatch")
bench_app.command(bench_experts, name="experts")
bench_app.command(bench_latency, name="latency")
bench_app.command(bench_plan, name="plan")
bench_app.command(bench_serve, name="serve")
bench_app.command(bench_throughput, name="throughput")
