"""What the tests of exported programs share."""

import jax
import numpy as np

import neuronjax


def normal(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def norm(*shape, **options):
    """`rms_norm` exported for operands of these shapes."""
    x = jax.ShapeDtypeStruct(shape, "float32")
    scale = jax.ShapeDtypeStruct(shape[-1:], "float32")
    return neuronjax.export(neuronjax.rms_norm, x, scale, **options)
