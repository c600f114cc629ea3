"""``bench experts``: random rows through the configured experts of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from crossdock.bench.clock import DeviceClock, repeated, spread_us
from crossdock.bench.dispatch import DTYPES, random_rows
from crossdock.bench.jobs import BenchJob, MoeShape
from crossdock.errors import UsageError
from crossdock.experts import adapt_experts, make_experts
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.experts import ExpertsSpec, ExpertTensors


def bench_experts(job: BenchJob, device: torch.device) -> list[dict[str, Any]]:
    """One object a number of tokens; all choices are local.

    Raises:
        UsageError: experts are to be chosen automatically, which takes a model.
    """
    choice, shape = job.config.experts, job.shape
    if choice.name == "auto":
        raise UsageError("bench experts needs a plugin by name, for instance --experts torch")
    configured = job.config.checkpoint.dtype
    dtype = DTYPES.get(configured, torch.bfloat16)
    spec = ExpertsSpec(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_experts,
        top_k=shape.top_k,
        activation="silu",
        dtype=dtype,
        device=device,
        weight_dtype=job.weight_dtype,
    )
    plugin = make_experts(choice.name, choice.options, spec)
    plugin.attach(ExpertTensors(layer=0, tensors=random_weights(shape, job.weight_dtype, dtype, device, job.seed)))
    experts = adapt_experts(plugin, frozenset({ReceiveLayout.TOKEN_ROWS}), shape.num_experts)
    clock = DeviceClock(device)
    report: list[dict[str, Any]] = []
    for num_tokens in job.num_tokens:
        hidden, ids, weights = random_rows(job, num_tokens, dtype, device, job.seed)
        received = Received(
            layout=ReceiveLayout.TOKEN_ROWS, rows=hidden, local_topk_ids=ids, row_weights=weights.float()
        )

        def run(received: Received = received) -> Sequence[float]:
            started = clock.mark()
            experts.run(0, received)
            return (clock.seconds(started, clock.mark()),)

        seconds = [one for (one,) in repeated(run, job.num_iters, job.num_iters_warmup)]
        flop = num_tokens * shape.top_k * 6 * shape.hidden_size * shape.intermediate_size
        report.append(
            {
                "experts": choice.name,
                "weight_dtype": job.weight_dtype,
                "dtype": str(dtype).removeprefix("torch."),
                "num_tokens": num_tokens,
                **attrs.asdict(shape),
                "num_iters": job.num_iters,
                **spread_us("experts", seconds),
                "tflops": round(flop / sorted(seconds)[len(seconds) // 2] / 1e12, 4),
            }
        )
    return report


def random_weights(
    shape: MoeShape, weight_dtype: str, dtype: torch.dtype, device: torch.device, seed: int
) -> Mapping[str, torch.Tensor]:
    """Tensors of one layer as ``ExpertTensors`` names them, of unit gain."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrices(rows: int, columns: int) -> torch.Tensor:
        size = (shape.num_experts, rows, columns)
        return torch.randn(size, generator=generator, device=device).mul_(columns**-0.5)

    plain = {
        "gate_up": matrices(2 * shape.intermediate_size, shape.hidden_size),
        "down": matrices(shape.hidden_size, shape.intermediate_size),
    }
    if weight_dtype != "fp8_block":
        return {name: tensor.to(dtype) for name, tensor in plain.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, stacked in plain.items():
        # Gate and up have scales of their own, each beginning on a block.
        halves = stacked.chunk(2, dim=1) if name == "gate_up" else (stacked,)
        parts = [[quantise_blocks(matrix) for matrix in half] for half in halves]
        values = [torch.stack([value.view(torch.uint8) for value, _ in half]) for half in parts]
        tensors[name] = torch.cat(values, dim=1).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.cat([torch.stack([scale for _, scale in half]) for half in parts], dim=1)
    return tensors
