"""Plugins of the ``model`` point, one folder each."""
