"""Dispatcher for ranks of one NVLink domain: Triton kernels over torch symmetric memory."""
