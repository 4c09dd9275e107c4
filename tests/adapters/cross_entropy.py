"""Cases of the loss."""

import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter


def _arrays(inputs, options):
    """Operands in the narrow dtype of the case, where their values are of it."""
    dtype = jnp.dtype(options.get("dtype", "bfloat16"))

    def given(x):
        narrow = x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(dtype)
        return narrow if jnp.array_equal(narrow.astype(x.dtype), x) else x

    return {name: given(x) for name, x in inputs.items()}


@adapter("cross_entropy_forward")
def forward(inputs, options):
    outs = neuronjax.cross_entropy_forward(**_arrays(inputs, options), **options)
    return dict(zip(("loss_hbm", "lse_state_hbm"), outs, strict=True))


@adapter("cross_entropy_backward")
def backward(inputs, options):
    grad = neuronjax.cross_entropy_backward(**_arrays(inputs, options), **options)
    return {"grad_logits_hbm": grad}
