"""Layers and readers used by two model plugins or more."""
