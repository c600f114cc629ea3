"""Join a trained checkpoint and its tokenizer into the folder that is shipped.

    python package_checkpoint.py --trained build/mini/trained --tokenizer build/mini/tokenizer --out crossdock-mini

Shards become one `model.safetensors`; tensors are written in the order of their names, so equal weights give an equal
file. Prints its SHA-256 and the size of the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

MAX_FOLDER_BYTES = 20_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def package(trained: Path, tokenizer: Path, out: Path) -> tuple[str, int]:
    """Write the folder; return (SHA-256 of `model.safetensors`, bytes of the folder).

    Raises ValueError where the folder is larger than `MAX_FOLDER_BYTES`.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(trained.glob("model*.safetensors")):
        tensors.update(load_file(shard))
    weights = out / "model.safetensors"
    save_file(dict(sorted(tensors.items())), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    shutil.copyfile(trained / "config.json", out / "config.json")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = json.dumps({**generation, "do_sample": False}, indent=2)
    (out / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MAX_FOLDER_BYTES:
        raise ValueError(
            f"{out} has {size} bytes, allowed are {MAX_FOLDER_BYTES}: make the model or vocabulary smaller"
        )
    return hashlib.sha256(weights.read_bytes()).hexdigest(), size


def main() -> None:
    """Read the command line and package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, required=True, help="the --out of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer of train_tokenizer.py")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    digest, size = package(options.trained, options.tokenizer, options.out)
    print(f"sha256 {digest}\nfolder {size} bytes")


if __name__ == "__main__":
    main()
