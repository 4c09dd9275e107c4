"""Numbers of `mlp` that would give NaN, and operands that are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.emit import mlp_kernel, quant_mlp_kernel
from tests.mlp_equations import FULL, PLAIN, call_of, quantized_call

NUMBERS = [0.0, -1.0, np.nan, np.inf]
IN_SCALES = ["gate_up_in_scale", "down_in_scale"]


def static(**changes):
    """Arguments of a STATIC call of four rows, without norm and addition."""
    arrays, settings, _ = quantized_call("STATIC", PLAIN, lead=(4,), dtype="float32")
    return arrays | settings | changes


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", IN_SCALES)
def test_a_scale_of_activations_is_positive_and_finite_in_prefill(name, value):
    """Decode reads none; a traced one is left to run time."""
    scale = jnp.ones((128, 1), jnp.float32).at[3].set(value)
    given = static(**{name: scale})
    (out,) = neuronjax.mlp(**given)
    assert np.isfinite(out).all()
    with pytest.raises(ValueError, match=f"^mlp: {name} must be positive .* {value}$"):
        neuronjax.mlp(**given, force_cte_mode=True)
    arrays = {k: x for k, x in given.items() if isinstance(x, jax.Array)}
    rest = {k: x for k, x in given.items() if k not in arrays}
    run = lambda a: neuronjax.mlp(**a, **rest, force_cte_mode=True)  # noqa: E731
    assert jax.eval_shape(run, arrays)[0].shape == out.shape


@pytest.mark.parametrize("value", NUMBERS)
def test_the_emitter_checks_its_own_scales(value):
    one, codes = jnp.ones((1, 1)), jnp.ones((8, 8), jnp.float8_e4m3)
    scales = dict(gate_up_w_scale=jnp.ones((2, 1)), down_w_scale=one)
    scales |= dict(gate_up_in_scale=one, down_in_scale=value * one)
    with pytest.raises(ValueError, match="^quant_mlp_kernel: down_in_scale must be"):
        quant_mlp_kernel(jnp.ones((97, 8)), *[codes] * 3, **scales, quant_type="STATIC")


@pytest.mark.parametrize("eps", [-1e-6, np.nan, np.inf])
def test_an_epsilon_that_makes_nan_is_refused(eps):
    x, w = jnp.ones((2, 8)), jnp.ones((8, 8))
    for function in (neuronjax.mlp, mlp_kernel):
        with pytest.raises(ValueError, match="eps must be finite and at least 0"):
            function(x, w, w, w, eps=eps)


@pytest.mark.parametrize("side", ["gate", "up"])
@pytest.mark.parametrize(
    ("lower", "upper"), [(1.0, 0.5), (np.nan, 1.0), (None, np.nan), (np.nan, None)]
)
def test_a_clamp_that_holds_nothing_is_refused(side, lower, upper):
    x, w = jnp.ones((2, 8)), jnp.ones((8, 8))
    limits = {f"{side}_clamp_lower_limit": lower, f"{side}_clamp_upper_limit": upper}
    for function in (neuronjax.mlp, mlp_kernel):
        with pytest.raises(ValueError, match=f"{lower} to {upper} for (the )?{side}"):
            function(x, w, w, w, **limits)


def test_a_clamp_to_one_value_and_no_clamp_at_all_are_taken():
    x, w = jnp.ones((2, 8)), jnp.ones((8, 8))
    both = dict(up_clamp_lower_limit=2.0, up_clamp_upper_limit=2.0)
    (out,) = neuronjax.mlp(x, w, w, w, **both)
    # SiLU of a gate of 8, times 2, summed over 8 columns.
    np.testing.assert_allclose(out, 8 / (1 + np.exp(-8.0)) * 2 * 8, rtol=1e-5)
    wide = dict(up_clamp_lower_limit=-np.inf, gate_clamp_upper_limit=np.inf)
    got, wanted = neuronjax.mlp(x, w, w, w, **wide), neuronjax.mlp(x, w, w, w)
    np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.parametrize("bound", [np.nan, -1.0, "wide"])
def test_a_clipping_bound_is_no_negative_number(bound):
    arrays, settings, _ = quantized_call("ROW", FULL, dtype="float32")
    with pytest.raises(ValueError, match=f"quant_clipping_bound .* got {bound}$"):
        neuronjax.mlp(**arrays, **settings | dict(quant_clipping_bound=bound))


def test_what_is_no_array_and_no_dtype_is_refused_by_name():
    arrays, settings, _ = call_of(PLAIN, dtype="float32")
    with pytest.raises(ValueError, match="output_dtype must be .* got foo$"):
        neuronjax.mlp(**arrays, **settings, output_dtype="foo")
    with pytest.raises(ValueError, match="down_w_scale .128, 1., got float$"):
        neuronjax.mlp(**static(down_w_scale=1.0))
    with pytest.raises(ValueError, match="up_proj_bias_tensor of dtype None"):
        neuronjax.mlp(**arrays, **settings | dict(up_proj_bias_tensor=1.0))


@pytest.mark.parametrize("rows", [2, 97])
def test_fp8_rows_without_their_scales_are_told_to_be_packed(rows):
    arrays, settings, _ = quantized_call("ROW", PLAIN, lead=(rows,), dtype="float32")
    arrays["hidden_tensor"] = arrays["hidden_tensor"].astype(jnp.float8_e4m3)
    with pytest.raises(ValueError, match="must be packed for ROW, .* decode") as found:
        neuronjax.mlp(**arrays, **settings, output_dtype="float32")
    assert len(str(found.value).splitlines()) == 1
