"""Grouped expert computation with DeepGEMM: bf16 or fp8 blocks, rows in aligned segments or in places of their experts."""
