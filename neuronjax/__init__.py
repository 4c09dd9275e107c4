"""The Neuron compiler's macro kernels as differentiable JAX primitives."""
