"""Convolutions over a mesh: the batch is split, and the channels of the result.

A core that has the filters of some output channels computes these alone: it needs every
input channel and nothing of another core. Depthwise channels need nothing of each other
in the first place.

What crosses the wire. Forward: nothing. Backward: for `conv1d` one all-reduce over the
channels' axis, of the gradient of `x_in`, which all its devices read; over the batch's
axis one all-reduce of each weight's gradient.
"""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from neuronjax.primitives.conv.conv1d import conv1d
from neuronjax.primitives.conv.depthwise import depthwise_conv1d_kernel
from neuronjax.primitives.options import ActFnType
from neuronjax.sharding.mesh import laid, require_axes


def sharded_conv1d(
    mesh: Mesh,
    x_in: Float[Array, "batch d_in length"],
    filters: Float[Array, "taps d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    *,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    activation_fn: ActFnType | str | None = None,
    batch: str | None = None,
    channels: str | None = "lnc",
) -> Float[Array, "batch d_out out"]:
    """`conv1d` with its output channels over a mesh axis, and its batch over another.

    Args:
        mesh: the devices.
        x_in: `[B, C_in, L]`; every device of the channels' axis reads it whole.
        filters: `[K, C_in, C_out]`, split by `C_out`.
        bias: `[C_out]`, split alike.
        stride: as in `conv1d`.
        padding: as in `conv1d`.
        dilation: as in `conv1d`.
        activation_fn: as in `conv1d`.
        batch: the mesh axis that splits `B`; `None` keeps it whole.
        channels: the mesh axis that splits `C_out`, such as the cores of a logical
            core; `None` keeps it whole.

    Returns:
        `[B, C_out, L_out]` in the dtype of `x_in`, split as `B` and `C_out` are.

    Raises:
        ValueError: the mesh lacks an axis, its devices do not divide `B` or `C_out`, or
            an argument breaks a rule of `conv1d`.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> x, filters = jnp.ones((1, 2, 5)), jnp.ones((3, 2, 4))
        >>> out = sharded_conv1d(make_mesh(data=1), x, filters, channels=None)
        >>> out.shape, float(out[0, 0, 0])
        ((1, 4, 3), 6.0)
    """
    name = "sharded_conv1d"
    require_axes(name, mesh, batch=batch, channels=channels)
    _require_even(name, mesh, "x_in", x_in, 0, batch)
    _require_even(name, mesh, "filters", filters, 2, channels)

    def local(x_in, filters, bias):
        return conv1d(x_in, filters, bias, stride, padding, dilation, activation_fn)

    specs = P(batch), P(None, None, channels), P(channels)
    split = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(batch, channels)
    )
    return split(*laid(mesh, (x_in, filters, bias), specs))


def sharded_depthwise_conv1d(
    mesh: Mesh,
    img_ref: Float[Array, "batch channels 1 width"],
    filter_ref: Float[Array, "channels 1 1 taps"],
    *,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    batch: str | None = None,
    channels: str | None = "lnc",
) -> Float[Array, "batch channels 1 out"]:
    """`depthwise_conv1d_implicit_gemm` with its channels over a mesh axis.

    Args:
        mesh: the devices.
        img_ref: `[N, C, 1, W]`, split by `N` and `C`.
        filter_ref: `[C, 1, 1, S]`, split by `C`.
        stride: of the width.
        padding: zeros before and behind the width.
        batch: the mesh axis that splits `N`; `None` keeps it whole.
        channels: the mesh axis that splits `C`; `None` keeps it whole.

    Returns:
        `[N, C, 1, Q]` in the dtype of `img_ref`, split as `img_ref` is.

    Raises:
        ValueError: the mesh lacks an axis, its devices do not divide `N` or `C`, or an
            argument breaks a rule of the convolution.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> x, filters = jnp.ones((1, 2, 1, 5)), jnp.ones((2, 1, 1, 3))
        >>> mesh = make_mesh(data=1)
        >>> sharded_depthwise_conv1d(mesh, x, filters, channels=None).shape
        (1, 2, 1, 3)
    """
    name = "sharded_depthwise_conv1d"
    require_axes(name, mesh, batch=batch, channels=channels)
    _require_even(name, mesh, "img_ref", img_ref, 0, batch)
    _require_even(name, mesh, "img_ref", img_ref, 1, channels)

    def local(img_ref, filter_ref):
        return depthwise_conv1d_kernel(
            img_ref, filter_ref, stride=stride, padding=padding
        )

    specs = P(batch, channels), P(channels)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return split(*laid(mesh, (img_ref, filter_ref), specs))


def _require_even(
    function: str, mesh: Mesh, name: str, x: Array, axis: int, over: str | None
) -> None:
    """Refuses an axis of an operand that the devices of a mesh axis do not divide."""
    shape = np.shape(x)
    if over is not None and (len(shape) <= axis or shape[axis] % mesh.shape[over]):
        raise ValueError(
            f"{function}: axis {axis} of {name} must be a multiple of the "
            f"{mesh.shape[over]} devices of {over!r}, got shape {shape}"
        )
