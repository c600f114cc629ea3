"""Plugins of the ``strategy`` point, one folder each."""
