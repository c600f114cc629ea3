"""Planners side by side: thread CPU milliseconds of a plan and the balance that it reaches.

    python tests/benchmarks/bench_plan.py [--trace FILE.npz ...] [--shape LAYERSxEXPERTS] [--config SLOTS:GPUS:NODES:GROUPS ...]
    python tests/benchmarks/bench_plan.py --traces FOLDER

The second form prints every goal of placement and balancing with what came and whether it holds; see plan_goals.py. Without a trace, loads of every kind are made (uniform, zipf, hot, dead, bursty, drift, topics). One thread, CPU clock: other
work on the machine disturbs the numbers by its use of caches only.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from crossdock.placement_io.load_files import read_load
from crossdock.planning import PlannerScore, read_algo, read_topology, score_planner, windows
from crossdock.testing.expert_loads import LOADS
from crossdock.types.placement import ExpertLoad
from plan_goals import print_goals

PLANNERS = ("global", "crossdock:effort=fast", "crossdock", "crossdock:effort=high")
CONFIGS = ("288:32:4:8", "288:72:9:8", "288:144:18:8")
CHAINED = ("crossdock", "crossdock:max_moves=8")
STEPS = 5


def _row(name: str, config: str, planner: str, score: PlannerScore) -> str:
    following = "-" if score.next_mean is None else f"{score.next_mean:.4f}"
    moved = "-" if score.moved_slots_mean is None else f"{score.moved_slots_mean:.1f}"
    return (
        f"{name:<18} {config:<13} {planner:<24} {score.ms_median:>8.2f} {score.ms_min:>8.2f} {score.now_mean:>8.4f}"
        f" {score.now_worst:>8.4f} {following:>8} {moved:>7} {score.bound_mean:>8.4f}"
    )


def main() -> None:
    """Print one table of full plans and one of plans that start from the one before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], help="file with expert loads instead of made-up ones")
    parser.add_argument("--shape", default="58x256", help="layers x experts of made-up loads")
    parser.add_argument("--config", action="append", default=[], help="SLOTS:GPUS:NODES:GROUPS")
    parser.add_argument("--window", type=int, default=1, help="steps that are summed to a window of a trace")
    parser.add_argument("--repeat", type=int, default=2, help="timed calls a plan")
    parser.add_argument("--traces", type=Path, help="folder of traces: print the goals instead")
    arguments = parser.parse_args()
    if arguments.traces is not None:
        print_goals(arguments.traces)
        return
    layers, experts = (int(size) for size in arguments.shape.split("x"))
    loads = (
        {path.rsplit("/", 1)[-1]: read_load([path]) for path in arguments.trace}
        if arguments.trace
        else {kind: ExpertLoad(counts=make((STEPS, layers, experts), 1)) for kind, make in LOADS.items()}
    )
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one thread; CPU clock")
    print(
        f"{'load':<18} {'config':<13} {'planner':<24} {'ms med':>8} {'ms min':>8} {'now':>8} {'worst':>8} {'next':>8} {'moved':>7} {'bound':>8}"
    )
    for chain, planners in ((False, PLANNERS), (True, CHAINED)):
        if chain:
            print("each plan starts from the one before:")
        for name, load in loads.items():
            parts = windows(load, arguments.window)
            for config in arguments.config or CONFIGS:
                topology = read_topology(config)
                for planner in planners:
                    score = score_planner(
                        read_algo(planner).make(), topology, parts, chain=chain, repeat=arguments.repeat
                    )
                    print(_row(name, config, planner, score))


if __name__ == "__main__":
    main()
