"""Train crossdock-mini on the encoded corpus and write the checkpoint.

    python train.py --tokens build/mini/tokens --out build/mini/trained --minutes 6          # as shipped, on one H200
    python train.py --tokens build/mini/tokens --out build/mini/trained --steps 3645         # a function of the seed alone

The learning rate rises for `warmup_steps`, then falls to zero along a half cosine of the share of minutes or steps that
is gone. Result in `--out`: the checkpoint (see checkpoint.py), `loss.csv` (step, minutes, train loss, validation loss of
every domain; nats a token) and `summary.json`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from checkpoint import save_checkpoint
from model import MiniModel, ModelShape
from torch import Tensor

SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHARD_BYTES = 12_000_000
VALIDATION_ROWS = 8


@attrs.frozen(kw_only=True)
class TrainSettings:
    """The table `[train]` of config.toml."""

    learning_rate: float
    warmup_steps: int
    weight_decay: float
    bias_update_rate: float
    document_rows: int
    chat_rows: int
    chat_row_tokens: int
    domain_share: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Budget:
    """When training ends: after `steps`, or after `minutes` where `steps` is 0."""

    steps: int
    minutes: float

    def share_gone(self, step: int, minutes: float) -> float:
        """Return how much of the budget is spent, 1.0 at the end."""
        return min(1.0, step / self.steps if self.steps else minutes / self.minutes)


class Corpus:
    """Token files of one split on the training device, and the windows drawn from them."""

    def __init__(self, folder: Path, split: str, settings: TrainSettings, row_tokens: int, device: str) -> None:
        """Read `{domain}.{split}.bin` and the chat files; raises FileNotFoundError naming the first one missing."""
        self.settings = settings
        self.row_tokens = row_tokens
        self.domains = {name: _read_ids(folder / f"{name}.{split}.bin", device) for name in settings.domain_share}
        self.chat = _read_ids(folder / f"chat.{split}.bin", device)
        self.chat_starts = torch.from_numpy(
            np.fromfile(folder / f"chat.{split}.starts.bin", np.uint32).astype(np.int64)
        )

    def documents(self, generator: torch.Generator, rows: int, domain: str | None = None) -> Tensor:
        """Return [rows, row_tokens + 1] int64: windows at random places, of one domain or by `domain_share`."""
        names = list(self.domains)
        share = torch.tensor([self.settings.domain_share[name] for name in names])
        picks = torch.multinomial(share, rows, replacement=True, generator=generator).tolist()
        windows = []
        for pick in picks:
            ids = self.domains[domain or names[pick]]
            start = int(torch.randint(len(ids) - self.row_tokens, (1,), generator=generator))
            windows.append(ids[start : start + self.row_tokens + 1])
        return torch.stack(windows)

    def conversations(self, generator: torch.Generator, rows: int) -> Tensor:
        """Return [rows, chat_row_tokens + 1] int64: windows that begin where a conversation begins."""
        length = self.settings.chat_row_tokens + 1
        usable = self.chat_starts[self.chat_starts + length <= len(self.chat)]
        picks = usable[torch.randint(len(usable), (rows,), generator=generator)].tolist()
        return torch.stack([self.chat[start : start + length] for start in picks])


def _read_ids(path: Path, device: str) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64)).to(device)


def window_loss(model: MiniModel, windows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss in nats a token over `windows` [rows, tokens + 1] and the expert counts of each MoE layer."""
    logits, counts = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()), counts


def make_optimizer(model: MiniModel, settings: TrainSettings) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def train_step(
    model: MiniModel, optimizer: torch.optim.Optimizer, batches: list[Tensor], settings: TrainSettings
) -> Tensor:
    """Make one optimiser step over all `batches`, weighted by their tokens, and move the routers' biases.

    Returns the mean loss of the step as a device scalar, so that nothing waits for it.
    """
    total = sum(windows[:, 1:].numel() for windows in batches)
    step_loss = torch.zeros((), device=batches[0].device)
    step_counts: list[Tensor] = []
    for windows in batches:
        with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=windows.is_cuda):
            loss, counts = window_loss(model, windows)
        weighted = loss * (windows[:, 1:].numel() / total)
        weighted.backward()  # type: ignore[no-untyped-call]
        step_loss += weighted.detach()
        step_counts = [a + b for a, b in zip(step_counts, counts, strict=True)] if step_counts else counts
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for mlp, counts_of_layer in zip(model.moe_mlps(), step_counts, strict=True):
        mlp.update_bias(counts_of_layer, settings.bias_update_rate)
    return step_loss


@torch.no_grad()
def validation_losses(model: MiniModel, corpus: Corpus, seed: int) -> dict[str, float]:
    """Return the loss of each domain and of chat on held-out text, the same windows every time."""
    losses = {}
    for name in (*corpus.domains, "chat"):
        generator = torch.Generator().manual_seed(seed)
        if name == "chat":
            windows = corpus.conversations(generator, 4 * VALIDATION_ROWS)
        else:
            windows = corpus.documents(generator, VALIDATION_ROWS, domain=name)
        with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=windows.is_cuda):
            losses[name] = float(window_loss(model, windows)[0])
    return losses


def learning_rate(settings: TrainSettings, step: int, share_gone: float) -> float:
    """Return the rate of a step: linear warm-up, then a half cosine down to 0 at the end of the budget."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * share_gone))


def train(config: dict[str, object], tokens: Path, out: Path, budget: Budget, device: str) -> float:
    """Train, write checkpoint and log to `out`, and return the last validation loss averaged over domains.

    Args:
        config: the parsed config.toml.
        tokens: the folder that train_tokenizer.py wrote.
        out: result folder; the checkpoint is written at the end of the budget and about every two minutes before.
        budget: steps or minutes.
        device: `cpu` or `cuda`.
    """
    seed = int(str(config["seed"]))
    shape = ModelShape(**config["model"])  # type: ignore[arg-type]
    settings = TrainSettings(**config["train"])  # type: ignore[arg-type]
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = MiniModel(shape).to(device)
    corpus = Corpus(tokens, "train", settings, shape.max_position_embeddings, device)
    held_out = Corpus(tokens, "val", settings, shape.max_position_embeddings, device)
    optimizer = make_optimizer(model, settings)
    generator = torch.Generator().manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    log: list[dict[str, float]] = []
    began = saved = time.monotonic()
    step, loss = 0, torch.zeros(())
    while (gone := budget.share_gone(step, (time.monotonic() - began) / 60)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, gone)
        batches = [corpus.documents(generator, settings.document_rows)]
        batches.append(corpus.conversations(generator, settings.chat_rows))
        loss = train_step(model, optimizer, batches, settings)
        step += 1
        if step % 250 == 0 or step in {1, 50}:
            _log_row(log, out, step, began, float(loss), validation_losses(model, held_out, seed))
        if time.monotonic() - saved > 120:
            save_checkpoint(model, out, SPECIAL_IDS, SHARD_BYTES)
            saved = time.monotonic()
    losses = validation_losses(model, held_out, seed)
    _log_row(log, out, step, began, float(loss), losses)
    save_checkpoint(model, out, SPECIAL_IDS, SHARD_BYTES)
    _write_summary(out, model, settings, step, time.monotonic() - began)
    return sum(losses.values()) / len(losses)


def _log_row(
    log: list[dict[str, float]], out: Path, step: int, began: float, loss: float, held_out: dict[str, float]
) -> None:
    minutes = (time.monotonic() - began) / 60
    row = {"step": step, "minutes": round(minutes, 3), "train": round(loss, 4)}
    row.update({f"val_{name}": round(value, 4) for name, value in held_out.items()})
    log.append(row)
    print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(log)


def _write_summary(out: Path, model: MiniModel, settings: TrainSettings, steps: int, seconds: float) -> None:
    rows = settings.document_rows * model.shape.max_position_embeddings + settings.chat_rows * settings.chat_row_tokens
    device = next(model.parameters()).device
    summary = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens_per_step": rows,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(rows * steps / seconds),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(summary, flush=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.toml"))
    parser.add_argument("--steps", type=int, default=0, help="steps to make; 0: go by --minutes")
    parser.add_argument("--minutes", type=float, default=6.0, help="wall-clock budget where --steps is 0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    config = tomllib.loads(options.config.read_text(encoding="utf-8"))
    budget = Budget(steps=options.steps, minutes=options.minutes)
    train(config, options.tokens, options.out, budget, options.device)


if __name__ == "__main__":
    main()
