"""Logits of every model variant on GPUs against float32 on the CPU, which the models' own tests hold to transformers within 1e-4."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from crossdock.config import CheckpointConfig, Config, LaunchConfig, ParallelConfig, PluginChoice, SchedulerConfig
from crossdock.groups import resolve_sizes
from crossdock.offline import logits, logits_job
from crossdock.ops.topk_routing import TopkRule, topk_routing
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.model_variants import VARIANTS
from crossdock.testing.random_checkpoint import write_random_checkpoint
from crossdock.testing.tiny_models import FAMILY_FIELDS, FRAME
from crossdock.testing.world import RankPool
from crossdock.types.capability import Environment
from crossdock.types.dispatch import DispatcherCapabilities
from crossdock_models._shared import router

Logits = list[npt.NDArray[np.float32]]
LENGTHS = (1, 7, 23, 64)
SCHEDULER = SchedulerConfig(page_tokens=4, kv_tokens=1024, max_step_tokens=64, chunk_tokens=16)
"""Prompts in chunks, and chunks of several prompts in a step."""
FP32_TOLERANCE = 1e-4
"""Of the largest logit, as against transformers."""
BF16_MEDIAN, BF16_ROW, BF16_FLIPPED = 0.03, 0.1, 0.25
"""Norm of a position's error: rounding to 8 bits leaves .01 to .02 on a CPU. Above BF16_ROW are positions whose router had a near tie that
rounding decided, or that look at such a position: up to 16 % of them on a CPU."""
FP8_TOLERANCE = 0.1
"""Norm of the error; activations of 3 bits in every product, with every expert chosen: three layers leave .07 where they are played on a CPU."""
FP8_FIELDS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""Sizes that every library's kernels take."""
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_TWO = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def prompts(vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, vocab_size, length).tolist() for length in LENGTHS]


IDS = prompts(FRAME["vocab_size"])


def save_variant(folder: Path, name: str) -> Path:
    variant = VARIANTS[name]
    config = {"model_type": variant.family, **FRAME, **FAMILY_FIELDS[variant.family], **variant.fields}
    return write_random_checkpoint(folder, config, seed=4)


def config_of(folder: Path, device: str, dtype: str, **choices: Any) -> Config:
    """``choices`` replace tables of the config."""
    config = Config(
        checkpoint=CheckpointConfig(path=str(folder), dtype=dtype),
        launch=LaunchConfig(device=device),
        scheduler=SCHEDULER,
    )
    return attrs.evolve(config, **choices)


def reference(folder: Path) -> Logits:
    return logits(folder, IDS, config_of(folder, "cpu", "float32", experts=PluginChoice(name="torch")))


def largest_error(found: Logits, wanted: Logits) -> float:
    """Relative to the largest logit of each prompt; infinite for NaN."""
    worst = max(
        float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in zip(found, wanted, strict=True)
    )
    return worst if worst == worst else float("inf")


def position_errors(found: Logits, wanted: Logits) -> npt.NDArray[np.float32]:
    """Norm of the error of every position, relative to what is wanted there."""
    ours, theirs = np.concatenate(found), np.concatenate(wanted)
    assert np.isfinite(ours).all()
    errors: npt.NDArray[np.float32] = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    return errors


def assert_close(found: Logits, wanted: Logits, dtype: str) -> None:
    if dtype == "float32":
        assert largest_error(found, wanted) <= FP32_TOLERANCE
        return
    errors = position_errors(found, wanted)
    assert (float(np.median(errors)) <= BF16_MEDIAN, float((errors > BF16_ROW).mean()) <= BF16_FLIPPED) == (
        True,
        True,
    ), errors


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_the_cpus_logits_on_a_gpu(name: str, tmp_path: Path) -> None:
    folder = save_variant(tmp_path, name)
    wanted = reference(folder)
    for dtype in ("float32", "bfloat16"):
        assert_close(logits(folder, IDS, config_of(folder, "cuda", dtype)), wanted, dtype)


@pytest.mark.parametrize("name", ["v3 yarn, different mscales", "qwen3", "mixtral"])
def test_bfloat16_on_a_cpu_is_as_close_as_a_gpu_must_be(name: str, tmp_path: Path) -> None:
    folder = save_variant(tmp_path, name)
    assert_close(logits(folder, IDS, config_of(folder, "cpu", "bfloat16")), reference(folder), "bfloat16")


@attrs.define(kw_only=True)
class RoutingOf32Bits:
    """In place of the router's choice: keeps what a first run chooses, then gives it to a second one with the second one's weights."""

    chosen: list[torch.Tensor] = attrs.field(factory=list)
    replayed: int | None = None
    flips: int = 0

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, rule: TopkRule, *slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = topk_routing(logits, bias, rule, *slots)
        if self.replayed is None:
            self.chosen.append(ids)
            return ids, weights
        wanted = self.chosen[self.replayed].to(ids.device)
        self.replayed += 1
        self.flips += int((ids.sort(-1).values != wanted.sort(-1).values).any(-1).sum())
        scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(-1, wanted.clamp_min(0))
        if rule.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return wanted, weights * rule.routed_scaling


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
@pytest.mark.parametrize("name", ["v3 kernel sizes", "qwen3 kernel sizes", "mixtral kernel sizes"])
def test_positions_far_off_in_bfloat16_are_near_ties_of_the_router(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the experts that float32 chooses every position is as close as rounding leaves it, so nothing else is wrong in the others."""
    folder = save_variant(tmp_path, name)
    routing = RoutingOf32Bits()
    monkeypatch.setattr(router, "topk_routing", routing)
    eager = attrs.evolve(SCHEDULER, graphs="off")
    wanted = logits(folder, IDS, config_of(folder, device, "float32", scheduler=eager))
    routing.replayed = 0
    errors = position_errors(logits(folder, IDS, config_of(folder, device, "bfloat16", scheduler=eager)), wanted)
    print(f"{name}: largest error of a position {errors.max():.4f}, router flips {routing.flips}")
    assert routing.replayed == len(routing.chosen)
    assert float(errors.max()) <= BF16_ROW


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, device="cuda") as gpus:
        yield gpus


LAYOUTS = {
    "dp": ParallelConfig(ranks=2, attn_dp_size=2),
    "tp": ParallelConfig(ranks=2, attn_tp_size=2),
    "dp-moe_tp": ParallelConfig(ranks=2, attn_dp_size=2, moe_ep_size=1, moe_tp_size=2),
}
TWO_GPUS = [
    ("allgatherv", "float32", "dp"),
    ("allgatherv", "float32", "tp"),
    ("allgatherv", "bfloat16", "dp-moe_tp"),
    ("alltoallv", "float32", "dp"),
    ("alltoallv", "bfloat16", "tp"),
    ("nvlink", "bfloat16", "dp"),
    ("nvlink", "bfloat16", "tp"),
]


@pytest.mark.gpu
@NEEDS_TWO
@pytest.mark.parametrize("name", ["v3 kernel sizes", "qwen3 kernel sizes"])
@pytest.mark.parametrize(("dispatcher", "dtype", "layout"), TWO_GPUS)
def test_two_gpus_give_the_cpus_logits(
    dispatcher: str, dtype: str, layout: str, name: str, pool: RankPool, tmp_path: Path
) -> None:
    folder = save_variant(tmp_path, name)
    config = config_of(folder, "cuda", dtype, parallel=LAYOUTS[layout], dispatcher=PluginChoice(name=dispatcher))
    found = run_on_pool(pool, logits_job(folder, IDS, config)).ordered_logits()
    assert_close(found, reference(folder), dtype)


DEEPEP = needs("deep_ep")
FP8_CASES = [
    pytest.param("alltoallv", {}, "triton", id="alltoallv-triton"),
    pytest.param("nvlink", {"wire": "fp8"}, "triton", id="nvlink-fp8-triton"),
    pytest.param("allgatherv", {}, "deep_gemm", id="allgatherv-deep_gemm", marks=needs("deep_gemm")),
    pytest.param("nvlink", {"wire": "native"}, "deep_gemm", id="nvlink-native-deep_gemm", marks=needs("deep_gemm")),
    pytest.param("nvlink", {"wire": "fp8"}, "deep_gemm", id="nvlink-fp8-deep_gemm", marks=needs("deep_gemm")),
    pytest.param(
        "deepep", {"mode": "normal"}, "deep_gemm", id="deepep-normal-deep_gemm", marks=[DEEPEP, needs("deep_gemm")]
    ),
    pytest.param(
        "deepep",
        {"mode": "low_latency"},
        "deep_gemm",
        id="deepep-low_latency-deep_gemm",
        marks=[DEEPEP, needs("deep_gemm")],
    ),
    pytest.param("deepep", {"mode": "auto", "wire": "bf16"}, "triton", id="deepep-auto-bf16-triton", marks=DEEPEP),
]


@pytest.mark.parametrize(("dispatcher", "options"), [case.values[:2] for case in FP8_CASES])
def test_the_dispatchers_of_the_fp8_cases_take_their_options(dispatcher: str, options: dict[str, object]) -> None:
    """Here, because without a GPU the cases themselves do not run."""
    sizes, packages = resolve_sizes(ranks=2, attn_dp_size=2), frozenset({"deep_ep", "triton"})
    env = Environment(device="cuda", sizes=sizes, dtype="bfloat16", packages=packages)
    found = call_hook(load_plugin("dispatcher", dispatcher), "dispatcher_capabilities", options=options, env=env)
    assert isinstance(found, DispatcherCapabilities), found


def save_fp8(folder: Path) -> Path:
    return write_random_checkpoint(
        folder, {"model_type": "deepseek_v3", **FRAME, **FAMILY_FIELDS["deepseek_v3"], **FP8_FIELDS}, seed=4
    )


@pytest.mark.gpu
@NEEDS_TWO
@pytest.mark.parametrize(("dispatcher", "options", "experts"), FP8_CASES)
def test_an_fp8_checkpoint_on_two_gpus_stays_close_to_float32(
    dispatcher: str, options: dict[str, object], experts: str, pool: RankPool, tmp_path: Path
) -> None:
    folder = save_fp8(tmp_path)
    config = config_of(
        folder,
        "cuda",
        "bfloat16",
        parallel=ParallelConfig(ranks=2, attn_dp_size=2),
        dispatcher=PluginChoice(name=dispatcher, options=options),
        experts=PluginChoice(name=experts),
    )
    found, wanted = run_on_pool(pool, logits_job(folder, IDS, config)).ordered_logits(), reference(folder)
    error = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, wanted, strict=True))
    print(f"{dispatcher} {options} {experts}: relative error {error:.4f}")
    assert error <= FP8_TOLERANCE
