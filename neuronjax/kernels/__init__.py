"""The arithmetic of each leaf on one device, in `jax.lax`."""
