"""The output projection over a mesh: the batch is split, and the heads.

Row `n*D + d` of the weight belongs to head `n`, so a plain split of the rows gives each
device the rows of its heads. Each device sums over its own; one all-reduce adds these
sums, in float32.

What crosses the wire. Forward: one all-reduce over the heads' axis. Backward: nothing
over the heads' axis; over the batch's axis one all-reduce, of the weight's gradient.
"""

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.primitives.output_projection.macro import output_projection_kernel
from neuronjax.sharding.mesh import require_axes


def sharded_output_projection(
    mesh: Mesh,
    attention: Float[Array, "..."],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "1 d_model"] | None = None,
    weight_scale: Float[Array, "rows columns"] | None = None,
    input_scale: Float[Array, "rows 1"] | None = None,
    *,
    quantization_type: QuantizationType | str = "NONE",
    form: str = "BNDS",
    batch: str | None = None,
    heads: str | None = "tensor",
) -> Array:
    """`output_projection_cte`, or for `form="DBNS"` `output_projection_tkg`, split.

    Args:
        mesh: the devices.
        attention: `[B, N, D, S]`, or `[D, B, N, S]` for the decode form.
        weight: `[N*D, H]`, rows in the order of the heads.
        bias: `[1, H]`; it is added once, after the sums.
        weight_scale: as in `output_projection_cte`, whole on every device: it belongs
            to columns. So do the interleaved fours of rows to one device.
        input_scale: as in `output_projection_cte`.
        quantization_type: as in `output_projection_cte`; `MX`, whose scales belong to
            rows, only with `heads=None`.
        form: `"BNDS"` (prefill) or `"DBNS"` (decode).
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        heads: the mesh axis that splits `N`; `None` keeps it whole.

    Returns:
        `[B, S, H]`, or for the decode form `[B*S, H]`, in the dtype of `attention`;
        whole on every device of the heads' axis.

    Raises:
        ValueError: the mesh lacks an axis, or `heads` would split a block-scaled
            weight.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> heads, weight = jnp.ones((1, 2, 4, 3)), jnp.ones((8, 5))
        >>> out = sharded_output_projection(make_mesh(tensor=1), heads, weight)
        >>> out.shape, float(out[0, 0, 0])
        ((1, 3, 5), 8.0)
    """
    require_axes("sharded_output_projection", mesh, batch=batch, heads=heads)
    if member(QuantizationType, quantization_type) is QuantizationType.MX and heads:
        raise ValueError(
            "sharded_output_projection: heads must be None for MX, whose blocks hold "
            f"rows of several heads, got {heads!r}"
        )
    narrow = is_fp8(weight.dtype)
    wide = accumulator(attention.dtype, *([] if narrow else [weight.dtype]))

    def local(attention, weight, bias, *scales):
        out = output_projection_kernel(
            attention,
            weight,
            None,
            *scales,
            quantization_type=quantization_type,
            form=form,
            output_dtype=wide,
        )
        out = out if heads is None else lax.psum(out, heads)
        out = out if bias is None else out + bias.astype(wide)
        return out.astype(attention.dtype)

    split = P(batch, heads) if form == "BNDS" else P(None, batch, heads)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split, P(heads), P(), P(), P()),
        out_specs=P(batch),
    )(attention, weight, bias, weight_scale, input_scale)
