"""Two micro-batches in turn, also in steps in which some replicas prefill while others decode."""
