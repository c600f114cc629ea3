"""Strategy with one stage a layer."""
