"""Padding policies: how unequal row counts of replicas become one buffer."""
