"""Always equal blocks."""
