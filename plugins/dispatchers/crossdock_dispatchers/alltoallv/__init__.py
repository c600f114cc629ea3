"""Dispatcher over a variable all-to-all: each row travels once to every rank that holds one of its experts."""
