"""Benchmarks of one part of a selection, and of the engine without HTTP."""
