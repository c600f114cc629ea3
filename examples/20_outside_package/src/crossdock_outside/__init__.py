"""Plugins for Crossdock that Crossdock does not know."""
