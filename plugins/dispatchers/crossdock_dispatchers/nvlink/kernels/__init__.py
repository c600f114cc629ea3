"""Kernels of the NVLink dispatcher, each beside its readable torch twin."""
