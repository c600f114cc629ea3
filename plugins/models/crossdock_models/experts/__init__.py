"""Experts plugins: grouped expert computation."""
