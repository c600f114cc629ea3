"""Policies that say whether experts should move now, one folder each."""
