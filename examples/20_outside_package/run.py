"""Logits of the bundled model on two ranks with this package's plugins, compared with one process without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from crossdock.config import Config
from crossdock.config_load import file_layer, load_config
from crossdock.offline import logits

PROMPTS = [[5, 17, 300, 42], [9], [7, 7, 120, 250, 33, 18, 900]]


def main() -> None:
    """Prints the largest difference relative to the largest logit."""
    outside = load_config([file_layer(Path(__file__).with_name("config.toml"))]).config
    expected = logits("", PROMPTS, Config(checkpoint=outside.checkpoint))
    found = logits("", PROMPTS, outside)
    largest = max(float(np.abs(array).max()) for array in expected)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
    print(
        f"{len(PROMPTS)} prompts on {outside.parallel.ranks} ranks with {outside.dispatcher.name} and {outside.padding.name}"
    )
    print(f"largest difference: {difference / largest:.1e} of the largest logit")


if __name__ == "__main__":
    main()
