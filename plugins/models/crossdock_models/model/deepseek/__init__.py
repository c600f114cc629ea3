"""DeepSeek-V2 and DeepSeek-V3."""
