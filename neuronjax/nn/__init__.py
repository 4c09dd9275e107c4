"""Flax NNX layers, exact twins of the public functions."""
