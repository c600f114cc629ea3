"""The engine end to end on one GPU: decode and prefill tokens per second of a random model made in GPU memory.

    python tests/benchmarks/gpu/engine.py --shape qwen3_30b --out FILE.json

Greedy, prompts of 128 random tokens, 128 new tokens each; prefill: 16 prompts of 4096 tokens. Decode counts whole-batch tokens from the
moment every sequence has its first one. Everything of serving but HTTP: scheduler, paged cache, step plan, sampling.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossdock.comm import local_comms
from crossdock.config import CheckpointConfig, Config, LaunchConfig, SchedulerConfig
from crossdock.engine_build import build_engine
from crossdock.rank_plan import plan_rank
from crossdock.types.link import AddRequests, Incoming, Outgoing, Outputs, Parked, Stop, Wake
from crossdock.types.request import EngineRequest, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_30b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dsv2_lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "vocab_size": 102400,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}
BATCHES = (1, 32, 256)
PROMPT, NEW, LONG_PROMPTS, LONG_PROMPT = 128, 128, 16, 4096


class BenchLink:
    """Feeds one workload after another and notes when tokens came."""

    def __init__(self, workloads: Sequence[tuple[str, tuple[EngineRequest, ...]]]) -> None:
        self._workloads = list(workloads)
        self._running: set[str] = set()
        self._parked: int | None = None
        self._arrivals: list[tuple[float, str, int]] = []
        self._name, self._begun_s = "", 0.0
        self.results: dict[str, dict[str, float]] = {}

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        if self._running:
            return ()
        wake = [] if self._parked is None else [Wake(step=self._parked)]
        self._parked = None
        if not self._workloads:
            return [*wake, Stop()]
        self._name, requests = self._workloads.pop(0)
        self._running = {request.rid for request in requests}
        self._arrivals.clear()
        self._begun_s = time.perf_counter()
        return [*wake, AddRequests(requests=requests)]

    def send(self, message: Outgoing) -> None:
        if isinstance(message, Parked):
            self._parked = message.step
        if not isinstance(message, Outputs):
            return
        now_s = time.perf_counter()
        for output in message.outputs:
            assert output.error is None, output.error
            self._arrivals.append((now_s, output.rid, len(output.token_ids)))
            if output.finish_reason is not None:
                self._running.discard(output.rid)
        if not self._running and self._arrivals:
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        first: dict[str, float] = {}
        for at_s, rid, _ in self._arrivals:
            first.setdefault(rid, at_s)
        all_started_s = max(first.values())
        after = sum(count for at_s, _, count in self._arrivals if at_s > all_started_s)
        self.results[self._name] = {
            "decode_tok_s": round(after / max(now_s - all_started_s, 1e-9), 1),
            "first_token_ms": round((min(first.values()) - self._begun_s) * 1e3, 1),
            "total_s": round(now_s - self._begun_s, 4),
        }
        print(self._name, self.results[self._name], flush=True)


def workloads(vocab: int) -> list[tuple[str, tuple[EngineRequest, ...]]]:
    generator = np.random.default_rng(0)

    def requests(name: str, count: int, length: int, new: int) -> tuple[str, tuple[EngineRequest, ...]]:
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        prompts = generator.integers(0, vocab, (count, length))
        rows = [tuple(int(token) for token in prompt) for prompt in prompts]
        return name, tuple(
            EngineRequest(rid=f"{name}-{i}", prompt_ids=row, sampling=sampling) for i, row in enumerate(rows)
        )

    made = [requests(f"warm {batch}", batch, PROMPT, 8) for batch in BATCHES]
    made.append(requests("warm prefill", LONG_PROMPTS, LONG_PROMPT, 1))
    made += [requests(f"decode {batch}", batch, PROMPT, NEW) for batch in BATCHES]
    made.append(requests("prefill", LONG_PROMPTS, LONG_PROMPT, 1))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try the script")
    parser.add_argument("--profile", default="", help="file for a table of kernels of the last decode workload")
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.shape])
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**shape, "dtype": "bfloat16"}), encoding="utf8")
        config = Config(
            checkpoint=CheckpointConfig(path=folder, load_format="random", dtype="bfloat16"),
            launch=LaunchConfig(device=arguments.device),
            scheduler=SchedulerConfig(
                max_running_requests=max(BATCHES),
                max_step_tokens=16384,
                chunk_tokens=8192,
                page_tokens=64,
                kv_tokens=131072,
                max_sequence_tokens=8192,
                prefix_cache=False,
                graphs=arguments.graphs,
            ),
        )
        started_s = time.perf_counter()
        link = BenchLink(workloads(shape["vocab_size"]))
        plan = plan_rank(config, 0)
        print("\n".join(plan.selection.lines()), flush=True)
        with build_engine(plan, local_comms(), link) as engine:
            print("built in", round(time.perf_counter() - started_s, 1), "s", flush=True)
            if arguments.profile:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    engine.run()
                table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)
                Path(arguments.profile).write_text(table, encoding="utf8")
            else:
                engine.run()
    prefill = link.results["prefill"]["total_s"]
    results = {
        "shape": arguments.shape,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "layers": shape["num_hidden_layers"],
        "prefill_tok_s": round(LONG_PROMPTS * LONG_PROMPT / prefill),
        **link.results,
    }
    Path(arguments.out).write_text(json.dumps(results, indent=1), encoding="utf8")
    print("prefill tok/s", results["prefill_tok_s"])


if __name__ == "__main__":
    main()
