"""Attention leaves: prefill, its backward, decode, tiled, and their plain references."""
