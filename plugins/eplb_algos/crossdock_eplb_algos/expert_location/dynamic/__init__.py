"""Tokens spread over all replicas of an expert."""
