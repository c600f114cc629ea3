"""Kernels of the Triton experts, each beside its readable torch twin."""
