"""Experts in torch operators: a readable reference and a fast path for the CPU."""
