"""First-party models plugins of Crossdock, one folder each."""
