"""First-party eplb_algos plugins of Crossdock, one folder each."""
