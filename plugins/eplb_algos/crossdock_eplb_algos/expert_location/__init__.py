"""Replica pickers: which of an expert's replicas takes a token."""
