"""Rank processes: started, watched and ended together; on one machine, on several, or under torchrun's environment."""
