"""Fixtures of the whole test tree."""

import os

import torch
from crossdock.testing.fixtures import rank_pool

if not torch.cuda.is_available():
    # Read when triton is first imported: kernels run interpreted on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

__all__ = ["rank_pool"]
