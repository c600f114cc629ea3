"""Padding by cost: equal blocks unless the sum is much smaller."""
