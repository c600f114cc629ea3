"""Measure how the expert load of a checkpoint moves with the domain of the text.

    python measure_experts.py --model ../../framework/crossdock/data/crossdock-mini --tokens build/mini/tokens

Runs transformers' own class over held-out text of each domain and counts the chosen experts of every MoE layer. Prints a
table and writes the counts as JSON: `{"domains": [...], "counts": [domain][layer][expert], ...}`.

Two numbers a pair of domains or a domain, both averaged over layers:
- total-variation distance of the load shares: 0 is equal, 1 is disjoint. The floor is the distance between the two
  halves of one domain: what remains when nothing but the passage changes;
- balancedness of the ranks under expert parallelism: mean over maximum rank load, with experts placed in order; 1 is
  perfect.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ROW_TOKENS = 1024
Counts = NDArray[np.int64]


class RouterCounter:
    """Counts the experts that each router of a transformers DeepSeek-V3 model chooses, through forward hooks."""

    def __init__(self, model: nn.Module, num_experts: int) -> None:
        """Hook every router of `model`."""
        self.num_experts = num_experts
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self.counts: Counts = np.zeros((len(routers), num_experts), np.int64)
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _module, _inputs, result, layer=layer: self._count(layer, result))

    def take(self) -> Counts:
        """Return the counts [MoE layers, experts] since the last call and start again at zero."""
        taken, self.counts = self.counts, np.zeros_like(self.counts)
        return taken

    def _count(self, layer: int, result: tuple[Tensor, Tensor, Tensor]) -> None:
        topk_ids = result[2].flatten().numpy()
        self.counts[layer] += np.bincount(topk_ids, minlength=self.num_experts)


def shares(counts: Counts) -> NDArray[np.float64]:
    """Return the load shares of counts [..., experts]; each row sums to 1."""
    result: NDArray[np.float64] = counts / counts.sum(axis=-1, keepdims=True)
    return result


def total_variation(a: Counts, b: Counts) -> float:
    """Return the total-variation distance of two counts [layers, experts], averaged over layers."""
    return float(0.5 * np.abs(shares(a) - shares(b)).sum(axis=-1).mean())


def balancedness(counts: Counts, moe_ep_size: int) -> float:
    """Return mean over maximum rank load of counts [layers, experts], averaged over layers, experts placed in order."""
    by_rank = counts.reshape(counts.shape[0], moe_ep_size, -1).sum(axis=-1)
    return float((by_rank.mean(axis=-1) / by_rank.max(axis=-1)).mean())


@torch.no_grad()
def domain_counts(model: nn.Module, counter: RouterCounter, ids: NDArray[np.uint16]) -> list[Counts]:
    """Return the counts of the first and of the second half of a text; each half in rows of `ROW_TOKENS`."""
    rows = torch.from_numpy(ids[: len(ids) // (2 * ROW_TOKENS) * 2 * ROW_TOKENS].astype(np.int64)).view(-1, ROW_TOKENS)
    halves = []
    for half in rows.chunk(2):
        for row in half:
            model(input_ids=row[None], use_cache=False)
        halves.append(counter.take())
    return halves


def report(domains: list[str], halves: list[list[Counts]]) -> dict[str, object]:
    """Return the numbers that the README quotes, and the raw counts."""
    whole = [first + second for first, second in halves]
    mixture = np.sum([np.round(shares(counts) * 1e6).astype(np.int64) for counts in whole], axis=0)
    pairs = {f"{a}-{b}": total_variation(whole[i], whole[j]) for (i, a), (j, b) in combinations(enumerate(domains), 2)}
    floors = {name: total_variation(*pair) for name, pair in zip(domains, halves, strict=True)}
    balance = {name: {ep: balancedness(c, ep) for ep in (2, 4, 8)} for name, c in zip(domains, whole, strict=True)}
    balance["equal mixture"] = {ep: balancedness(mixture, ep) for ep in (2, 4, 8)}
    return {
        "domains": domains,
        "total_variation": pairs,
        "total_variation_mean": float(np.mean(list(pairs.values()))),
        "total_variation_floor_mean": float(np.mean(list(floors.values()))),
        "balancedness": balance,
        "counts": [counts.tolist() for counts in whole],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of train_tokenizer.py")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens a domain")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    counter = RouterCounter(model, model.config.n_routed_experts)
    domains = ["python", "git", "man", "sql", "chat"]
    texts = [np.fromfile(options.tokens / f"{name}.val.bin", np.uint16)[: options.max_tokens] for name in domains]
    numbers = report(domains, [domain_counts(model, counter, ids) for ids in texts])
    print(json.dumps({key: value for key, value in numbers.items() if key != "counts"}, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(numbers) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
