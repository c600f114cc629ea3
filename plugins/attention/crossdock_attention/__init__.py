"""First-party attention plugins of Crossdock, one folder each."""
