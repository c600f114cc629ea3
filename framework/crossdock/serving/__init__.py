"""The OpenAI-compatible server: aiohttp application, ZeroMQ link to the ranks, router, tokenizer and detokenizer."""
