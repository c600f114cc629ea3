"""The library's products under one set of names, whatever its version calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
from crossdock.errors import PluginImportFailed

from crossdock_models.experts.deep_gemm.capabilities import ALIGNMENT, WHEEL

Scaled = tuple[torch.Tensor, torch.Tensor]
"""float8_e4m3fn values and their float32 scales."""
NAMES = {
    "contiguous_fp8": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"),
    "contiguous_bf16": ("m_grouped_bf16_gemm_nt_contiguous",),
    "masked_fp8": (
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    ),
    "masked_bf16": ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
}
"""Our name -> what releases have called it, newest first."""
ALIGNMENT_NAMES = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")


@attrs.frozen(kw_only=True, eq=False)
class Products:
    """Grouped products ``D = A B^T``, one B a group.

    ``contiguous_*(a, b, d, groups)``: a [F, k] or scaled, b [S, n, k] or scaled with 128 x 128 blocks, d [F, n] bf16, groups [F] int32, equal
    within each aligned segment, -1 where nothing is computed. ``masked_*(a, b, d, counts, expected)``: a [S, C, k], d [S, C, n], counts [S] int32.
    """

    contiguous_fp8: Callable[[Scaled, Scaled, torch.Tensor, torch.Tensor], Any]
    contiguous_bf16: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
    masked_fp8: Callable[[Scaled, Scaled, torch.Tensor, torch.Tensor, int], Any]
    masked_bf16: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], Any]
    set_num_sms: Callable[[int], Any]
    get_num_sms: Callable[[], int]


def load_products() -> Products:
    """The products of the installed ``deep_gemm``.

    Raises:
        PluginImportFailed: it is absent, does not fit this torch, or lacks a product; names the wheel that fits.
    """
    try:
        library = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:
        raise PluginImportFailed(
            f"experts deep_gemm cannot import deep_gemm beside torch {torch.__version__} "
            f"({str(error).partition(chr(10))[0]}); the wheel that fits: {WHEEL}"
        ) from error
    return products_of(library)


def products_of(library: Any) -> Products:
    """The products of a module with any of the known sets of names.

    Raises:
        PluginImportFailed: a product has none of its names, or segments are aligned to another number of rows.
    """
    version = getattr(library, "__version__", "of unknown version")
    found = {ours: _first(library, names) for ours, names in NAMES.items()}
    missing = [" or ".join(NAMES[ours]) for ours, product in found.items() if product is None]
    if missing:
        raise PluginImportFailed(
            f"experts deep_gemm: deep_gemm {version} has no {', '.join(missing)}; the wheel that fits: {WHEEL}"
        )
    alignment = _first(library, ALIGNMENT_NAMES)
    if alignment is not None and ALIGNMENT % int(alignment()):
        raise PluginImportFailed(
            f"experts deep_gemm: deep_gemm {version} aligns segments to {int(alignment())} rows, this plugin to {ALIGNMENT}; "
            f"the wheel that fits: {WHEEL}"
        )
    return Products(**found, set_num_sms=library.set_num_sms, get_num_sms=library.get_num_sms)


def _first(library: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)
