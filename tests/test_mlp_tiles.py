"""The MLP on tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile
from neuronjax.emit import mlp_fused_add_kernel, mlp_kernel
from neuronjax.kernels.mlp import dense
from neuronjax.kernels.mlp.operands import Operands
from neuronjax.primitives.mlp.facts import ARGUMENTS
from tests.mlp_equations import (
    EPILOGUE,
    FULL,
    PLAIN,
    call_of,
    ids,
)


def tiled_call(combination, d_model, d_ff, lead=(2, 3)):
    """The emitter's arguments, untiled and tiled."""
    arrays, settings, residual = call_of(
        combination, lead=lead, d_model=d_model, d_ff=d_ff, dtype="float32"
    )
    names = {v: k for k, v in ARGUMENTS["mlp"].items()}
    given = {names[key]: x for key, x in arrays.items()}
    if residual is not None:
        given |= dict(attn_out=residual, mlp_out=residual)
    if "addend" in given:
        given["fused_add"] = given.pop("addend")
    tiles = {
        key: MemrefTile.from_tensor(x, 0 if key in ("gate_w", "up_w", "down_w") else -1)
        for key, x in given.items()
    }
    norm, activation = settings["normalization_type"], settings["activation_fn"]
    config = dict(norm=norm, activation=activation, eps=settings["eps"])
    emitter = mlp_kernel if residual is None else mlp_fused_add_kernel
    return functools.partial(emitter, **config), given, tiles


@pytest.mark.parametrize("sizes", [(256, 24), (128, 384)])
@pytest.mark.parametrize("combination", [FULL, EPILOGUE], ids=ids)
def test_tiles_give_tiles_of_the_same_values(combination, sizes):
    emit, tensors, tiles = tiled_call(combination, *sizes)
    got, wanted = emit(**tiles), emit(**tensors)
    assert isinstance(got, MemrefTile) and got.axis == 2
    assert got.data.shape == (128, sizes[0] // 128, 2, 3)
    np.testing.assert_allclose(got.to_tensor(), wanted, atol=2e-5)
    assert (
        neuronjax.trace(lambda t: emit(**t), tiles).count("TiledNativeKernelMLP") == 1
    )
    loss = lambda t, of: jnp.sin(of(emit(**t))).sum()  # noqa: E731
    grads = jax.grad(loss)(tiles, lambda out: out.data)
    whole = jax.grad(loss)(tensors, lambda out: out)
    for key, grad in grads.items():
        np.testing.assert_allclose(
            grad.to_tensor(), whole[key], rtol=1e-3, atol=1e-4, err_msg=key
        )


def test_tiles_of_two_axes_are_enough():
    emit, tensors, tiles = tiled_call(PLAIN, 128, 16, lead=(5,))
    np.testing.assert_allclose(
        emit(**tiles).to_tensor(), emit(**tensors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_tiled_leaf_puts_no_operand_together_again(which):
    _, tensors, tiles = tiled_call(FULL, 256, 384)
    names = Operands._fields
    data = {k: getattr(t, "data", None) for k, t in tiles.items()}
    data["addend"] = data.pop("fused_add")
    ops = [data.get(key) for key in names]
    config = dict(norm="rms", fused_add="prologue", name="TiledNativeKernelMLP")
    outs = dense.mlp_tiled_fwd(*ops, **config)
    assert outs[0].shape == (128, 2, 2, 3) and outs[1].shape == (128, 3, 2, 3)
    fun = lambda *ops: dense.mlp_tiled_fwd(*ops, **config)  # noqa: E731
    if which == "backward":
        ops = [*ops, *outs, *map(jnp.ones_like, outs)]
        fun = lambda *ops: dense.mlp_tiled_bwd(*ops, **config)  # noqa: E731
    given = [x for x in ops if x is not None]
    slots = [i for i, x in enumerate(ops) if x is not None]

    def call(*arrays):
        full = dict(zip(slots, arrays, strict=True))
        return fun(*[full.get(i) for i in range(len(ops))])

    jaxpr = jax.make_jaxpr(call)(*given).jaxpr
    whole = {x.shape for x in tensors.values()}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("reshape", "transpose"):
            operand = any(v in jaxpr.invars for v in eqn.invars)
            shape = eqn.outvars[0].aval.shape
            merged = len(shape) < len(eqn.invars[0].aval.shape)
            assert not (operand and (merged or shape in whole)), eqn
            assert not (operand and eqn.primitive.name == "transpose"), eqn


def test_a_mix_of_tiles_and_tensors_is_refused():
    emit, tensors, tiles = tiled_call(PLAIN, 128, 16)
    with pytest.raises(ValueError) as refusal:
        emit(**dict(tiles, hidden=tensors["hidden"]))
    first, *_ = str(refusal.value).splitlines()
    words = "must be all tensors or all tiles, not a mix of both"
    assert first == f"Inputs/outputs to mlp_kernel {words}"


def test_tiles_that_do_not_fit_sbuf_are_refused_with_what_was_asked():
    shapes = [((1, 128, 512), -1), ((512, 8192), 0), ((512, 8192), 0), ((8192, 512), 0)]
    tiles = [
        jax.eval_shape(lambda s=s, a=a: MemrefTile.from_tensor(jnp.zeros(s), a))
        for s, a in shapes
    ]
    # A partition holds 4*128 of hidden, 4*8192 of gate and of up, 64*512 of down.
    asked = 4 * (2 * 4 * 128 + 2 * 4 * 8192 + 64 * 512)
    with pytest.raises(ValueError, match=f"SBUF of gen3: 196608 bytes .* got {asked}"):
        jax.eval_shape(mlp_kernel, *tiles)


def test_a_width_that_the_chip_does_not_take_is_refused_for_tiles_only():
    """R-26: the nearest size is fed back, and works."""
    emit, tensors, tiles = tiled_call(PLAIN, 96, 16)
    emit(**tensors)
    report = neuronjax.can("mlp_kernel", **tensors)
    assert report and not report.on_chip and report.nearest == {"H": 128}
    with pytest.raises(ValueError, match="nearest sizes that pass every rule: H = 128"):
        emit(**tiles)
    emit, _, tiles = tiled_call(PLAIN, report.nearest["H"], 16)
    assert neuronjax.can("mlp_kernel", **tiles).on_chip
    emit(**tiles)


def test_one_error_lists_every_shape_that_is_wrong():
    """R-26."""
    x, w = jnp.ones((2, 8)), jnp.ones((8, 6))
    with pytest.raises(ValueError) as refusal:
        neuronjax.mlp(x, w, w, w, up_proj_bias_tensor=jnp.ones(6))
    for argument in ("down_proj_weights_tensor", "up_proj_bias_tensor"):
        assert f"{argument} must have shape" in str(refusal.value)
