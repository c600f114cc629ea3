"""The command line, on top of everything; only the chosen command's module is imported."""
