"""Dispatcher that gathers rows and scatters sums by itself."""
