"""Live balancing: when experts move, how their tensors travel between steps, and how a layer switches (DESIGN section 10)."""
