"""What ``deepep`` can do in a parallel layout; no torch and no library, so that it can be asked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.groups import align_rows, drop_unit_axes
from crossdock.types.capability import Refusal
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout, WireDtype
from crossdock.types.layout import COMPLETE, LOCAL_ROWS
from crossdock.types.step import DispatchMode

from crossdock_dispatchers.deepep.capacity import capacity_refusal, needed_low_latency_rows

if TYPE_CHECKING:
    from crossdock.types.capability import Environment
    from crossdock.types.parallel import ParallelSizes

    from crossdock_dispatchers.deepep.options import DeepEpOptions

MODES = {
    "normal": frozenset({DispatchMode.NORMAL}),
    "low_latency": frozenset({DispatchMode.LOW_LATENCY}),
    "auto": frozenset({DispatchMode.NORMAL, DispatchMode.LOW_LATENCY}),
}
LAYOUTS = {DispatchMode.NORMAL: ReceiveLayout.TOKEN_ROWS, DispatchMode.LOW_LATENCY: ReceiveLayout.EXPERT_MAJOR}
WIRES = {
    "auto": frozenset({WireDtype.NATIVE, WireDtype.FP8_BLOCK}),
    "bf16": frozenset({WireDtype.NATIVE}),
    "fp8": frozenset({WireDtype.FP8_BLOCK}),
}
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Sizes that the library's kernels were built for."""
RANK_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks that the library has a launch configuration for."""
WHEEL = (
    "pip install 'crossdock[deepep]' (tokenspeed-deepep==1.2.1.post20251110, for torch 2.11, CUDA 13 and Python 3.12)"
)


def deepep_capabilities(
    sizes: ParallelSizes, options: DeepEpOptions, low_latency_rows: int | None
) -> DispatcherCapabilities:
    """Rank-local rows in and out, owing nothing; the expert group must be all ranks.

    ``low_latency_rows``: the limit of a step in ``low_latency`` mode; the other modes take any number in prefill.
    """
    local_rows = drop_unit_axes(LOCAL_ROWS, sizes)
    modes = MODES[options.mode]
    return DispatcherCapabilities(
        devices=frozenset({"cuda"}),
        layouts=frozenset(LAYOUTS[mode] for mode in modes),
        input_rows=local_rows,
        output_rows=local_rows,
        output_owed=COMPLETE,
        needs_full_ep=True,
        rank_invariant_picks_needed=False,
        # The normal protocol tells the host how many rows arrive.
        graph_capture=DispatchMode.LOW_LATENCY in modes,
        capacity_rows_per_rank=low_latency_rows if options.mode == "low_latency" else None,
        wire_dtypes=WIRES[options.wire],
        modes=modes,
        split_is_useful=True,
        max_in_flight=2,
        communication_sms=options.overlap_sms if DispatchMode.NORMAL in modes else 0,
        communication_sms_settable=DispatchMode.NORMAL in modes,
    )


def deepep_answer(options: DeepEpOptions, env: Environment) -> DispatcherCapabilities | Refusal:
    """The capabilities, or why it cannot run where ``env`` says."""
    sizes = env.sizes
    max_rows, decode_rows = (
        align_rows(rows, sizes.attn_tp_size) // sizes.attn_tp_size
        for rows in (env.max_rows_per_rank, env.max_decode_rows)
    )
    needed = needed_low_latency_rows(options, max_rows, decode_rows)
    if env.device == "cuda":
        refusal = _refusal(options, env) or capacity_refusal(options, needed)
        if refusal is not None:
            return refusal
    return deepep_capabilities(sizes, options, options.low_latency_rows or needed or None)


def _refusal(options: DeepEpOptions, env: Environment) -> Refusal | None:
    if "deep_ep" not in env.packages:
        return Refusal(code="package_missing", sentence=f"dispatcher deepep needs the module deep_ep: {WHEEL}")
    if env.dtype != "bfloat16":
        return Refusal(
            code="dtype_not_supported",
            sentence=f"dispatcher deepep moves bfloat16 rows, not {env.dtype}; set checkpoint.dtype = 'bfloat16'",
        )
    if env.sizes.ranks not in RANK_COUNTS:
        return Refusal(
            code="rank_count_not_supported",
            sentence=f"dispatcher deepep runs on {', '.join(map(str, RANK_COUNTS))} ranks, not on {env.sizes.ranks}; choose nvlink or alltoallv",
        )
    hidden_size = env.model.hidden_size if env.model is not None else None
    has_low_latency = DispatchMode.LOW_LATENCY in MODES[options.mode]
    if has_low_latency and hidden_size is not None and hidden_size not in LOW_LATENCY_HIDDEN_SIZES:
        return Refusal(
            code="hidden_size_not_supported",
            sentence=f"dispatcher deepep has no low-latency kernels for hidden size {hidden_size}; set dispatcher.mode = 'normal'",
        )
    if env.num_nodes > 1 and options.mode == "auto":
        return Refusal(
            code="one_mode_across_nodes",
            sentence="dispatcher deepep: across machines both protocols would share one buffer, which the normal one leaves dirty; "
            "set dispatcher.mode to 'normal' or 'low_latency'",
        )
    return None
