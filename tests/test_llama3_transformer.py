"""`llama3_transformer` on one device, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from tests import llama3_equations as case
from tests.llama3_equations import error, operands, reference, sizes


def _run(given, **options):
    return jax.jit(lambda g: neuronjax.llama3_transformer(**g, **options))(given)


@pytest.mark.parametrize("order", ["group", "kind"])
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(G=1, n=3, B=1), dict(G=3, n=1, L=1, S=1), dict(L=3, H=5, I=7, D=2)],
    ids=str,
)
def test_outputs_keys_and_values_are_those_of_the_equations(changes, order):
    """R-06: neighbouring query heads share a key/value head; R-18: half-split pairs."""
    z = sizes(**changes)
    given = operands(z)
    got = _run(given, qkv_order=order, output_kv=True)
    assert error(got, reference(given, z, order=order)) <= 2e-6
    assert error([_run(given, qkv_order=order)], got[:1]) == 0


def test_rows_longer_than_a_block_of_attention_are_right():
    z = sizes(B=1, S=259, L=1, G=1)
    given = operands(z)
    assert error(_run(given, output_kv=True), reference(given, z)) <= 3e-6


def test_float64_stays_float64():
    """R-13."""
    with jax.enable_x64(True):
        z = sizes()
        given = operands(z, dtype="float64")
        got = _run(given, output_kv=True, eps=0.1)
        assert {x.dtype for x in got} == {jnp.dtype("float64")}
        assert error(got, reference(given, z, eps=0.1)) <= 1e-13


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_errs_at_most_twice_what_plain_bfloat16_does(seed):
    z = sizes(L=3, H=32, I=48, S=17)
    given = operands(z, dtype="bfloat16", seed=seed)
    got = _run(given, output_kv=True)
    assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
    with neuronjax.plain():
        plain = _run(given, output_kv=True)
    exact = reference(given, z)
    for a, b, c in zip(got, plain, exact, strict=True):
        assert error([a], [c]) <= 2 * error([b], [c])


def test_weights_of_another_dtype_keep_the_dtype_of_x():
    z = sizes()
    given = operands(z)
    for name in case.STACKS:
        given[name] = given[name].astype(jnp.bfloat16)
    got = _run(given, output_kv=True)
    assert {x.dtype for x in got} == {jnp.dtype("float32")}
    assert error(got, reference(given, z)) <= 2e-6


def test_lists_of_layers_are_stacked():
    given = operands(sizes())
    listed = given | {name: [*given[name]] for name in case.STACKS}
    assert error([_run(listed)], [_run(given)]) == 0
    loss = lambda w: _run(given | dict(W_ups=w)).sum()  # noqa: E731
    own, each = jax.grad(loss)(given["W_ups"]), jax.grad(loss)([*given["W_ups"]])
    assert error(each, own) == 0


def test_the_next_token_decodes_as_transformer_tkg_does():
    """The same weights, tables and caches, two key/value heads, in both functions."""
    z = sizes(S=6)
    whole, tables = operands(z), ("RoPE_cos", "RoPE_sin")
    first, last = (
        whole | dict(X=whole["X"][:, own]) | {k: whole[k][..., own] for k in tables}
        for own in (slice(5), slice(5, 6))
    )
    _, keys, values = _run(first, output_kv=True)
    # Nine slots: five are filled, and the last row of the mask is the new token.
    seen = jnp.array([1, 1, 1, 1, 1, 0, 0, 0, 1], jnp.int32)[:, None, None, None]
    output, k_caches, v_caches = neuronjax.transformer_tkg(
        **last,
        K_caches=jnp.pad(keys, [(0, 0)] * 4 + [(0, 4)]),
        V_caches=jnp.pad(values, [(0, 0)] * 3 + [(0, 4), (0, 0)]),
        mask_cache=jnp.broadcast_to(seen, (9, z["B"], 1, 1)),
        mask_active=None,
        position_ids=jnp.full((z["B"], 1), 5, jnp.int32),
        num_layers=z["L"],
    )
    wanted, *held = _run(whole, output_kv=True)
    got = output[:, 0], k_caches[..., :6], v_caches[..., :6, :]
    assert error(got, (wanted[:, 5], *held)) <= 2e-6


def test_what_comes_later_does_not_reach_a_token():
    """R-08: were it NaN, as padding on the right may be."""
    given = operands(sizes())
    spoiled = given | dict(X=given["X"].at[:, 3:].set(jnp.nan))
    got, wanted = _run(spoiled), _run(given)
    assert np.isnan(got[:, 3:]).all()
    np.testing.assert_array_equal(got[:, :3], wanted[:, :3])


def test_a_nan_in_a_layer_reaches_the_result():
    given = operands(sizes())
    given["W_downs"] = given["W_downs"].at[0, 0, 0].set(jnp.nan)
    assert np.isnan(_run(given)).any()


def test_it_is_one_macro_and_its_gradient_another():
    given = operands(sizes())
    seen = neuronjax.trace(lambda g: neuronjax.llama3_transformer(**g), given)
    assert seen.names == ("Llama3Transformer",) and seen.count(seen.names[0]) == 1
    gradient = jax.grad(lambda g: neuronjax.llama3_transformer(**g).sum())
    seen = neuronjax.trace(gradient, given)
    assert seen.names == ("Llama3Transformer", "Llama3TransformerBwd")
    assert [seen.count(name) for name in seen.names] == [1, 1]


def test_hints_change_nothing():
    given = operands(sizes())
    got = neuronjax.emit.llama3_transformer_kernel(**given, num_tiles=3)
    np.testing.assert_array_equal(got, neuronjax.llama3_transformer(**given))


def test_a_symbolic_batch_is_exported():
    """R-49."""
    z = sizes()
    (batch,) = jax.export.symbolic_shape("b")
    given = operands(z)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in given.items()}
    shapes["X"] = jax.ShapeDtypeStruct((batch, z["S"], z["H"]), "float32")
    for name in ("RoPE_cos", "RoPE_sin"):
        table = (z["D"] // 2, batch, z["S"])
        shapes[name] = jax.ShapeDtypeStruct(table, "float32")
    run = jax.jit(lambda g: neuronjax.llama3_transformer(**g))
    saved = jax.export.export(run)(shapes)
    for size in (1, 3):
        given = operands(sizes(B=size))
        assert error([saved.call(given)], [run(given)]) <= 1e-6


def test_can_says_what_the_chip_takes():
    given = operands(sizes())
    report = neuronjax.can("llama3_transformer", **given)
    assert report and not report.on_chip
    assert "H in multiples of 128" in str(report)
    z = sizes(B=1, S=128, H=256, G=1, n=2, D=128, I=128, L=1)
    big = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in operands(z).items()}
    assert neuronjax.can("llama3_transformer", **big).on_chip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(W_ups=[]), r"W_ups must be a list of layers, each of 2 axes, got list"),
        (
            dict(W_ups=[jnp.zeros((8, 6)), jnp.zeros((8, 5))]),
            "W_ups must be a list of layers of one shape and dtype",
        ),
        (
            dict(W_ups=3),
            r"W_ups must be an array of 3 axes or a list of layers, got int",
        ),
        (
            dict(X=jnp.zeros((2, 8))),
            r"X must be an array of 3 axes, got shape \(2, 8\)",
        ),
        (
            dict(W_outs=jnp.zeros((2, 18, 8))),
            r"W_outs must have N\*D rows .* got 18 and 32",
        ),
        (
            dict(W_gates=jnp.zeros((3, 8, 6))),
            r"W_gates must have shape \[layers, H, I\]",
        ),
        (dict(qkv_order="kinds"), "qkv_order one of kind, group"),
        (dict(output_kv=1), "output_kv True or False"),
        (dict(eps=float("nan")), "eps must be a finite number"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, message):
    given = operands(sizes()) | changes
    with pytest.raises(ValueError, match=f"llama3_transformer: .*{message}"):
        neuronjax.llama3_transformer(**given)


def test_tiles_are_refused():
    tile = neuronjax.MemrefTile.from_tensor(jnp.zeros((2, 5, 8)), 2)
    given = operands(sizes()) | dict(X=tile)
    for function in (
        neuronjax.llama3_transformer,
        neuronjax.emit.llama3_transformer_kernel,
    ):
        with pytest.raises(ValueError, match="Llama3Transformer has no tiled form"):
            function(**given)


def test_the_emitter_takes_no_lists():
    given = operands(sizes())
    given["W_ups"] = [*given["W_ups"]]
    with pytest.raises(ValueError, match="W_ups must be an array of 3 axes, got list"):
        neuronjax.emit.llama3_transformer_kernel(**given)


def test_an_axis_of_vmap_is_no_axis_of_ranks():
    given = operands(sizes())
    dims = {name: None for name in given} | dict(W_ups=0)
    stacked = given | dict(W_ups=jnp.stack([given["W_ups"]] * 2))

    def run(g):
        return neuronjax.llama3_transformer(**g, axis="ranks")

    with pytest.raises(ValueError, match="axis must name a mesh axis"):
        jax.vmap(run, (dims,), axis_name="ranks")(stacked)


def test_ranks_that_may_hold_another_x_are_refused():
    given = operands(sizes(B=2))
    kinds, devices = (AxisType.Auto,), jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("ranks",), kinds, devices=devices)
    specs = {name: P() for name in given} | dict(X=P("ranks"))

    def run(g):
        tables = {k: g[k][:, :1] for k in ("RoPE_cos", "RoPE_sin")}
        return neuronjax.llama3_transformer(**(g | tables), axis="ranks")

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P("ranks"))
    with pytest.raises(ValueError, match="axis needs ranks that hold X alike"):
        mapped(given)
