"""A linear layer with everything around it: the leaf of `FusedLinear`."""
