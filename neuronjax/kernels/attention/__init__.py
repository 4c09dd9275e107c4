"""Attention leaves: prefill and backward, decode, tiled, their plain references."""
