"""The loss of a classifier over a large vocabulary, on logits and on their factors."""
