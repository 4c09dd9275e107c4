"""Cases of the convolutions."""

import neuronjax
from tests.adapters import adapter, take


@adapter("conv1d")
def conv1d(inputs, options):
    keys = ("stride", "dilation", "activation_fn", "lnc_shard")
    given = take(options, **{key: key for key in keys})
    padding = tuple(options.get("padding", (0, 0)))
    arrays = (inputs["x_in"], inputs["filters"], inputs.get("bias"))
    return {"out": neuronjax.conv1d(*arrays, padding=padding, **given)}


@adapter("depthwise_conv1d_implicit_gemm")
def depthwise(inputs, options):
    keys = ("feature_group_count", "batch_group_count")
    given = take(options, **{key: key for key in keys})
    # The peer reads no padding of the height, and no order of axes.
    width = tuple(options.get("padding", ((0, 0), (0, 0)))[1])
    pairs = ("stride", "rhs_dilation", "lhs_dilation")
    given |= {key: tuple(options[key]) for key in pairs if key in options}
    out = neuronjax.depthwise_conv1d_implicit_gemm(
        inputs["img_ref"], inputs["filter_ref"], ((0, 0), width), **given
    )
    return {"output": out}
