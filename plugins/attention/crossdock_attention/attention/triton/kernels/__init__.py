"""Kernels of the Triton attention backend, each beside its readable torch twin."""
