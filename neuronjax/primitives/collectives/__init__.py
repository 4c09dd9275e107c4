"""Collectives as macros: rings that gather or reduce, with a product or without."""
