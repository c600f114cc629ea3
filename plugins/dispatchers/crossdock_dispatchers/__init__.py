"""First-party dispatchers plugins of Crossdock, one folder each."""
