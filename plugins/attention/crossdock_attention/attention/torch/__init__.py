"""Attention over the paged cache in torch operators: gather pages, then attend."""
