"""Draw `loss.csv` of a training run as an SVG (needs the extra `plots`).

python plot_loss.py loss.csv loss.svg
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt


def plot(log: Path, picture: Path) -> None:
    """Draw training loss and the validation loss of every domain over steps."""
    mpl.rcParams.update({"svg.hashsalt": "crossdock", "svg.fonttype": "none", "font.size": 9})
    with log.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name in rows[0]:
        if name in {"step", "minutes"}:
            continue
        style = {"color": "black", "linewidth": 2.0} if name == "train" else {"linewidth": 1.2}
        label = "train (all)" if name == "train" else f"held out: {name.removeprefix('val_')}"
        axes.plot([int(row["step"]) for row in rows], [float(row[name]) for row in rows], label=label, **style)
    axes.set(xlabel="step", ylabel="nats a token", ylim=(0, 9))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    plot(options.log, options.picture)


if __name__ == "__main__":
    main()
