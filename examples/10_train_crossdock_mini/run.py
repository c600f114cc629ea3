"""The recipe in small, in seconds on a CPU: corpus, tokenizer, training, checkpoint; the loss must fall.

    python run.py

The corpus is this folder's own text, the model has two layers and eight experts. It writes nothing outside a temporary
folder and needs no network.
"""

from __future__ import annotations

import csv
import json
import tempfile
import tomllib
from pathlib import Path

from chat_turns import conversations, small_talk_facts
from package_checkpoint import package
from train import Budget, train
from train_tokenizer import documents, encode, save
from train_tokenizer import train as train_bpe

HERE = Path(__file__).parent
PIECE_CHARS = 600
STEPS = 40
SMALL_MODEL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "n_routed_experts": 8,
    "max_position_embeddings": 128,
}
SMALL_TRAINING = {"warmup_steps": 5, "document_rows": 4, "chat_rows": 8, "chat_row_tokens": 64}


def write_corpus(folder: Path) -> None:
    """Write a corpus of the form of prepare_data.py: pieces of this folder's files as four domains, and small talk."""
    folder.mkdir(parents=True)
    sources = {"python": "model.py", "git": "chat_turns.py", "man": "train.py", "sql": "clean_text.py"}
    for domain, source in sources.items():
        text = (HERE / source).read_text(encoding="utf-8")
        pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
        lines = [json.dumps({"name": f"{domain}-{n}", "text": piece}) for n, piece in enumerate(pieces * 8)]
        (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    turns = conversations(small_talk_facts() * 8, seed=1)
    (folder / "chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")


def main() -> None:
    """Run the recipe and print the claim that the test checks."""
    config = tomllib.loads((HERE / "config.toml").read_text(encoding="utf-8"))
    config["model"].update(SMALL_MODEL)
    config["train"].update(SMALL_TRAINING)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_corpus(work / "corpus")
        texts = (text for domain in ("python", "git", "man", "sql") for _, text in documents(work / "corpus", domain))
        tokenizer = train_bpe(texts, SMALL_MODEL["vocab_size"])
        save(tokenizer, work / "tokenizer")
        encode(tokenizer, work / "corpus", work / "tokens")
        train(config, work / "tokens", work / "trained", Budget(steps=STEPS, minutes=0.0), "cpu")
        with (work / "trained" / "loss.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        digest, size = package(work / "trained", work / "tokenizer", work / "packaged")
    first, last = float(rows[0]["train"]), float(rows[-1]["train"])
    print(f"packaged checkpoint of {size} bytes, sha256 {digest}")
    print(f"training loss fell from {first:.2f} to {last:.2f} nats a token in {STEPS} steps")


if __name__ == "__main__":
    main()
