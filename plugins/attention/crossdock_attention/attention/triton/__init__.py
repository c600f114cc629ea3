"""Paged attention in Triton kernels, GQA and MLA, capturable decode, for CUDA devices."""
