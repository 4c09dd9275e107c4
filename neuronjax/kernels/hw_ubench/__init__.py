"""The matmul probes: several small products in one pass of the array."""
