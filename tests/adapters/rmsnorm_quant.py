"""Cases of `rmsnorm_quant`, `rmsnorm_tkg` and `layernorm_tkg`."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import neuronjax
from tests.adapters import adapter, comparison, take, within

_LAYOUTS = {
    "lnc1": {},
    "lnc2": dict(lnc=2),
    "hidden_dim_tp": dict(hidden_dim_tp=True),
}


@adapter("rmsnorm_quant_kernel")
def rmsnorm_quant(inputs, options):
    call, settings = dict(inputs), dict(options)
    if settings.get("norm_type") == "NO_NORM":  # ignored there; ours refuses it
        call.pop("ln_w", None)
    static = settings.get("quantization_type") == "STATIC"
    if static:  # not applied there; ours refuses it
        settings.pop("lower_bound", None)
        scale = call["input_dequant_scale"]
        call["input_dequant_scale"] = jnp.broadcast_to(scale[:1], (128, 1))
    kargs = neuronjax.RmsNormQuantKernelArgs(**settings)
    got = neuronjax.rmsnorm_quant(
        call.pop("hidden"), call.pop("ln_w", None), kargs, **call
    )
    if static:
        return {"norm_out": got}
    codes, scale = neuronjax.unpack_rows(got)
    raw = jax.lax.bitcast_convert_type(got, jnp.uint8)
    return {"norm_out": codes, "dequant_scale": scale, "packed_bytes": raw}


def _steps(x):
    """How many fp8 values lie between zero and `x`, with its sign."""
    codes = np.asarray(x, ml_dtypes.float8_e4m3).view(np.uint8).astype(int)
    return np.where(codes & 0x80, -(codes & 0x7F), codes & 0x7F)


@comparison("rmsnorm_quant_kernel")
def compare(name, got, wanted, case):
    """Codes are equal but for rounding ties: one step in a thousand of them."""
    if name == "dequant_scale":
        case = dict(case, tolerance=case["tolerance"]["dequant_scale"])
        return within(name, got[name], wanted[name], case)
    ours, theirs = got[name], wanted[name]
    if name == "packed_bytes":
        assert ours.shape == theirs.shape
        tail = got["dequant_scale"].astype("<f4")[..., 0]
        raw = np.asarray(tail)[..., None].view(np.uint8)
        np.testing.assert_array_equal(np.asarray(ours)[..., -4:], raw)
        ours, theirs = (
            np.asarray(x)[..., :-4].astype(np.uint8).view(ml_dtypes.float8_e4m3)
            for x in (ours, theirs)
        )
    assert ours.shape == theirs.shape
    apart = np.abs(_steps(ours) - _steps(theirs))
    assert apart.max() <= 1 and (apart > 0).sum() <= max(1, apart.size // 1000)


@adapter("rmsnorm_tkg")
def rmsnorm_tkg(inputs, options):
    call = take(options, eps="eps", hidden_actual="hidden_actual")
    layout = _LAYOUTS[options.get("output_tile_layout", "lnc1")]
    return {"out": neuronjax.rmsnorm_tkg(**inputs, **call, **layout)}


@adapter("layernorm_tkg")
def layernorm_tkg(inputs, options):
    layout = _LAYOUTS[options.get("output_tile_layout", "lnc1")]
    return {
        "out": neuronjax.layernorm_tkg(**inputs, **take(options, eps="eps"), **layout)
    }
