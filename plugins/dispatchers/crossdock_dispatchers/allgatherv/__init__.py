"""Dispatcher without an all-to-all: every rank holds all rows and computes a partial sum over its own experts."""
