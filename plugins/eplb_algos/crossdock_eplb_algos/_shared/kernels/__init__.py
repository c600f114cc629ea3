"""Kernels that several replica pickers use."""
