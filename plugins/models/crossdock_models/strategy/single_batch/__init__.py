"""One micro-batch; the shared experts run while routed rows travel."""
