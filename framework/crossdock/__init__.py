"""Crossdock serves Mixture-of-Experts models with data-parallel attention and expert parallelism; every choice is a plugin."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
