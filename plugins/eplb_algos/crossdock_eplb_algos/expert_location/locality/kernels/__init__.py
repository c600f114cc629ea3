"""Kernels of the ``locality`` picker."""
