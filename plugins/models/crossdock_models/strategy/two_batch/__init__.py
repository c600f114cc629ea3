"""Two micro-batches in turn: one computes while the other's rows travel."""
