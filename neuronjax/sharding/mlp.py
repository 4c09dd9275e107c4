"""The MLP over a mesh: the batch is split, and the width between its projections.

Gate and up are split by columns, down by rows: each device computes its columns of the
gated values and their share of the result. One all-reduce adds the shares, in float32.

What crosses the wire. Forward: one all-reduce over the tensor axis. Backward: one over
it, of the gradients of what every device holds whole (activations, gain, offset); over
the batch's axis one all-reduce of the weights' gradients.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.mlp import mlp
from neuronjax.sharding.mesh import require_axes


def mlp_specs(batch: str | None, tensor: str | None) -> dict[str, P]:
    """How each tensor of `mlp` lies on the mesh, by argument name.

    Args:
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        tensor: the mesh axis that splits `I`; `None` keeps it whole.

    Returns:
        A partition spec for every tensor; the result lies as `hidden_tensor`.

    Example:
        >>> tuple(mlp_specs("data", "tensor")["down_proj_weights_tensor"])
        ('tensor', None)
    """
    columns, rows = P(None, tensor), P(tensor, None)
    return dict(
        hidden_tensor=P(batch),
        gate_proj_weights_tensor=columns,
        up_proj_weights_tensor=columns,
        down_proj_weights_tensor=rows,
        normalization_weights_tensor=P(),
        normalization_bias_tensor=P(),
        gate_proj_bias_tensor=columns,
        up_proj_bias_tensor=columns,
        down_proj_bias_tensor=P(),
        fused_add_tensor=P(batch),
    )


def sharded_mlp(
    mesh: Mesh,
    hidden_tensor: Float[Array, "batch seq d_model"],
    gate_proj_weights_tensor: Float[Array, "d_model d_ff"] | None,
    up_proj_weights_tensor: Float[Array, "d_model d_ff"],
    down_proj_weights_tensor: Float[Array, "d_ff d_model"],
    *,
    batch: str | None = None,
    tensor: str | None = "tensor",
    **options: Any,
) -> list[Array]:
    """`mlp` with the batch and the intermediate width split over `mesh`.

    Args:
        mesh: the devices.
        hidden_tensor: `[B, S, H]`.
        gate_proj_weights_tensor: `[H, I]`.
        up_proj_weights_tensor: `[H, I]`.
        down_proj_weights_tensor: `[I, H]`.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        tensor: the mesh axis that splits `I`; `None` keeps it whole.
        **options: further arguments of `mlp`, by name. The down bias is added once,
            after the sums.

    Returns:
        What `mlp` returns, whole on every device of the tensor axis.

    Raises:
        ValueError: the mesh lacks an axis, or its size does not divide what it splits.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> x, w = jnp.ones((1, 2, 4)), jnp.ones((4, 4))
        >>> sharded_mlp(make_mesh(tensor=1), x, w, w, w)[0].shape
        (1, 2, 4)
    """
    require_axes("sharded_mlp", mesh, batch=batch, tensor=tensor)
    specs = mlp_specs(batch, tensor)
    given = dict(
        hidden_tensor=hidden_tensor,
        gate_proj_weights_tensor=gate_proj_weights_tensor,
        up_proj_weights_tensor=up_proj_weights_tensor,
        down_proj_weights_tensor=down_proj_weights_tensor,
        **options,
    )
    arrays = {k: x for k, x in given.items() if k in specs and x is not None}
    static = {k: v for k, v in given.items() if k not in arrays}
    dtype = static.pop("output_dtype", None) or hidden_tensor.dtype
    stores = static.pop("store_fused_add_result", False)
    wide = accumulator(*(x.dtype for x in arrays.values()))

    def local(arrays):
        bias = arrays.pop("down_proj_bias_tensor", None)
        (out,) = mlp(**(static | arrays), output_dtype=wide)
        outs = [out if tensor is None else lax.psum(out, tensor)]
        if bias is not None:
            outs = [outs[0] + bias.astype(wide)]
        if stores:
            # The macro's own sum would vary over the tensor axis, as its result does.
            terms = (arrays["hidden_tensor"], arrays["fused_add_tensor"])
            outs.append(sum(x.astype(wide) for x in terms))
        return [x.astype(dtype) for x in outs]

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({key: specs[key] for key in arrays},),
        out_specs=P(batch),
    )
    return split(arrays)
