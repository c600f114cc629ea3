"""Project name, version and markers of the hook API."""

from __future__ import annotations

import pluggy

PROJECT = "crossdock"
HOOK_API_VERSION = 1
"""Raised by any incompatible change of a spec; every ``plugin.py`` states the one that it was written for."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
