"""Decoders built from `neuronjax.nn`, their checkpoints and their text."""
