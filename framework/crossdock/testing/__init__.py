"""Conformance suites, fakes and worlds of ranks, for us and for third parties."""
