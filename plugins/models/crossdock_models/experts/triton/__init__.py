"""Experts in Triton kernels: grouped products without a host synchronisation, for CUDA devices."""
