"""Plugins of the ``attention`` point, one folder each."""
