"""Dispatcher over DeepEP's buffer: the normal protocol for prefill, the low-latency one for decode."""
