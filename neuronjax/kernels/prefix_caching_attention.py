"""Prefill attention behind a cached prefix whose used length is a run-time value.

The prefix is a segment of its own: it is never joined to the new keys, and its blocks
past the used length are never visited.
"""

from typing import Any

from jaxtyping import Array

from neuronjax.kernels.attention.blocks import Folded
from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.attention.prefill import attention_fwd


def prefix_caching_attention_fwd(
    q: Folded, k: Folded, v: Folded, extras: Extras, **config: Any
) -> tuple[Array, Array, Array]:
    """Returns what `attention_fwd` does; `extras` holds the prior and its length."""
    assert extras.k_prior is not None and extras.used is not None
    return attention_fwd(q, k, v, extras, **config)
