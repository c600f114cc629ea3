"""Every op of a forward pass in declared order, one micro-batch."""
