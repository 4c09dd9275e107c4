"""Norms and reductions of any axes: the leaf of `NeuronReduceMacro`."""
