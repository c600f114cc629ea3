"""Strategy with one stage a layer and two micro-batches in turn."""
