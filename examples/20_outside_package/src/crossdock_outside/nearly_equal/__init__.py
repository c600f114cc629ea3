"""Padding policy that pads when it costs little."""
