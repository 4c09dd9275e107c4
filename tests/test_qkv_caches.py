"""Quantized keys and values in fp8 caches: values, slots, and what stays untouched."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import neuronjax
from neuronjax import emit
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.qkv import shard_qkv_columns, sharded_qkv
from tests.qkv_case import call, operands, reference

HEADS = (2, 1, 4)
SCALES = dict(k_scale=0.5, v_scale=0.25)


def caching(shape=(2, 3, 6), dtype="float8_e4m3", blocks=False, heads=HEADS, **changes):
    """The arrays and options of a call that writes caches, filled with other values."""
    x = operands(shape, heads, scale=4.0)
    arrays, options = call(x, heads, "RMS_NORM", add=False)
    width = heads[1] * heads[2]
    size = (3, 4, width) if blocks else (shape[0], shape[1] + 2, width)
    held = np.random.default_rng(1).integers(0, 256, (2, *size), np.uint8)
    caches = jax.lax.bitcast_convert_type(jnp.asarray(held), jnp.dtype(dtype))
    arrays |= dict(k_cache=caches[0], v_cache=caches[1])
    arrays |= {k: jnp.full((1, 1), v, "float32") for k, v in SCALES.items()}
    if blocks:
        slots = np.random.default_rng(2).permutation(12)[: shape[0] * shape[1]]
        arrays["slot_mapping"] = jnp.asarray(slots.reshape(shape[:2]), "int32")
        options |= dict(use_block_kv=True, block_size=4)
    return arrays, options | changes


def bits(x):
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8))


def rows_of(arrays, options, dtype, low=-240.0, high=240.0):
    """Query heads, and the codes of keys and values, from the equations in float64."""
    plain = {k: v for k, v in arrays.items() if k in operands(heads=HEADS)}
    y, _ = reference(plain, options)
    query, width = HEADS[0] * HEADS[2], HEADS[1] * HEADS[2]
    parts = np.split(y, [query, query + width], axis=2)
    codes = [
        np.clip(part / scale, low, high).astype(dtype)
        for part, scale in zip(parts[1:], SCALES.values(), strict=True)
    ]
    return parts[0], codes


def differ(got, wanted):
    """How many codes differ; none by more than one step."""
    got, wanted = (np.asarray(x, "float64") for x in (got, wanted))
    assert np.abs(got - wanted).max() <= 2.0**-3 * np.abs(wanted).max()
    return (got != wanted).mean()


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("blocks", [False, True])
def test_keys_and_values_are_written_and_nothing_else(dtype, blocks):
    """R-15: every other slot keeps its bits, those of a NaN included."""
    arrays, options = caching(dtype=dtype, blocks=blocks, kv_dtype=dtype)
    q, k, v = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))(arrays)
    query, codes = rows_of(arrays, options, getattr(ml_dtypes, dtype))
    np.testing.assert_allclose(q, query, rtol=1e-5, atol=1e-5)
    for got, old, new in zip((k, v), ("k_cache", "v_cache"), codes, strict=True):
        assert got.dtype == jnp.dtype(dtype) and got.shape == arrays[old].shape
        flat, before = (bits(x).reshape(-1, 4) for x in (got, arrays[old]))
        where = np.asarray(
            arrays["slot_mapping"] if blocks else [[0, 1, 2], [5, 6, 7]]
        ).ravel()
        others = np.setdiff1d(np.arange(len(flat)), where)
        np.testing.assert_array_equal(flat[others], before[others])
        written = np.asarray(got).reshape(-1, 4)[where]
        assert differ(written, new.reshape(-1, 4)) < 0.05


@pytest.mark.parametrize("value", [-1, 12, 1000])
def test_a_slot_outside_is_an_error_or_leaves_the_caches_alone(value):
    """R-15: known slots are refused; traced ones write their token nowhere."""
    arrays, options = caching(blocks=True)
    bad = arrays["slot_mapping"].at[0, 1].set(value)
    with pytest.raises(ValueError, match=rf"^qkv_cte: slot_mapping .* got {value}$"):
        neuronjax.qkv_cte(**arrays | dict(slot_mapping=bad), **options)
    run = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))
    good, got = run(arrays), run(arrays | dict(slot_mapping=bad))
    slot = int(arrays["slot_mapping"][0, 1])
    for a, b, old in zip(good[1:], got[1:], ("k_cache", "v_cache"), strict=True):
        a, b, old = (bits(x).reshape(-1, 4) for x in (a, b, arrays[old]))
        np.testing.assert_array_equal(b[slot], old[slot])
        np.testing.assert_array_equal(np.delete(b, slot, 0), np.delete(a, slot, 0))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("dtype", "slots", "written"),
    [
        ("int64", [2**32, 1, 2**63 - 1], [1]),
        ("uint64", [2**64 - 1, 1, 2**32], [1]),
        ("uint32", [2**32 - 1, 1, 2**31], [1]),
        ("int8", [127, 1, -1], [1, 127]),
    ],
)
def test_slots_of_any_width_are_compared_before_they_are_narrowed(
    dtype, slots, written, plain
):
    """R-15: int32 would take 2**32 for slot 0; int8 cannot count 168 slots."""
    arrays, options = caching(shape=(1, 3, 6), blocks=True)
    arrays |= {k: jnp.tile(arrays[k], (14, 1, 1)) for k in ("k_cache", "v_cache")}
    with jax.enable_x64(True):
        arrays["slot_mapping"] = jnp.asarray(np.array([slots], dtype))
        run = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))
        with neuronjax.plain() if plain else contextlib.nullcontext():
            _, *caches = run(arrays)
    for got, old in zip(caches, ("k_cache", "v_cache"), strict=True):
        # As values: the plain form may change the bits of a NaN.
        got, old = (np.asarray(x, "f4").reshape(-1, 4) for x in (got, arrays[old]))
        kept = (got == old) | (np.isnan(got) & np.isnan(old))
        np.testing.assert_array_equal(np.flatnonzero(~kept.all(1)), written)


def test_float_slots_are_refused_by_their_dtype():
    arrays, options = caching(blocks=True)
    floats = arrays["slot_mapping"].astype("float32")
    with pytest.raises(ValueError, match=r"got \(2, 3\) of dtype float32"):
        neuronjax.qkv(**arrays | dict(slot_mapping=floats), **options)


def test_a_slot_named_twice_is_refused():
    arrays, options = caching(blocks=True)
    twice = arrays["slot_mapping"].at[0].set(7)
    with pytest.raises(ValueError, match="slot_mapping must name a slot once, got 7"):
        neuronjax.qkv(**arrays | dict(slot_mapping=twice), **options)


def test_more_positions_than_the_cache_has_are_refused():
    """R-15: of a flat cache the sizes are known, under `jit` too."""
    arrays, options = caching()
    arrays |= {k: arrays[k][:, :2] for k in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="max_seq >= S"):
        jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))(arrays)


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        ("float8_e4m3", {}),
        ("float8_e4m3fn", {}),
        ("float8_e4m3fn", dict(fp8_max=448.0, fp8_min=-448.0)),
        ("float8_e4m3", dict(fp8_max=np.float64(16), fp8_min=-8)),
    ],
)
def test_overflow_saturates_at_the_visible_limits(dtype, limits):
    """R-22, R-48: clipped to +-240 unless named; NaN stays NaN."""
    x = jnp.array([[[1.0], [1e6], [-1e6], [jnp.inf], [jnp.nan]]])
    cache, one = jnp.zeros((1, 5, 1), dtype), jnp.ones((1, 1))
    counts = dict(d_head=1, num_q_heads=1, num_kv_heads=1)
    _, k, _ = neuronjax.qkv_cte(
        x,
        jnp.ones((1, 3)),
        k_cache=cache,
        v_cache=cache,
        k_scale=one,
        v_scale=one,
        **counts,
        **limits,
    )
    high, low = limits.get("fp8_max", 240), limits.get("fp8_min", -240)
    wanted = [1, high, low, high, np.nan]
    np.testing.assert_array_equal(np.asarray(k, "float32")[0, :, 0], wanted)


def test_the_scale_divides_and_may_have_128_rows():
    arrays, options = caching()
    wide = {k: jnp.tile(arrays[k], (128, 1)) for k in SCALES}
    a, b = (neuronjax.qkv_cte(**arrays | s, **options) for s in ({}, wide))
    for x, y in zip(a[1:], b[1:], strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("blocks", [False, True])
def test_caches_take_the_prefill_path_whatever_the_size(blocks):
    arrays, options = caching(shape=(1, 2, 6), blocks=blocks)
    rope = {k: arrays.pop(k) for k in ("cos_cache", "sin_cache")}
    options["fused_rope"] = False
    more = dict(mlp_prev=arrays["input"], attention_prev=arrays["input"])
    options["fused_residual_add"] = True
    got = neuronjax.qkv(**arrays, **more, **options)
    assert len(rope) == 2 and len(got) == 3
    for a, b in zip(got, neuronjax.qkv_cte(**arrays, **more, **options), strict=True):
        np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))


def test_the_emitter_returns_the_sum_before_the_caches():
    arrays, options = caching()
    given = dict(
        hidden=arrays["input"],
        qkv_w=arrays["fused_qkv_weights"],
        norm_w=arrays["gamma_norm_weights"],
        mlp_out=arrays["input"],
        attn_out=arrays["input"],
    )
    given |= {k: arrays[k] for k in ("k_cache", "v_cache", *SCALES)}
    given |= {k: options[k] for k in ("d_head", "num_q_heads", "num_kv_heads")}
    outs = emit.qkv_fused_add_kernel(**given, return_sum=True)
    assert [x.shape for x in outs] == [(2, 3, 8), (2, 3, 6), (2, 5, 4), (2, 5, 4)]
    np.testing.assert_allclose(outs[1], 3 * arrays["input"], rtol=1e-6)
    alone = emit.qkv_fused_add_kernel(**given)
    np.testing.assert_array_equal(bits(alone[1]), bits(outs[2]))


@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_flow_through_the_query_heads_alone(blocks):
    """R-45: caches are constants, integer slots have no tangent."""
    arrays, options = caching(blocks=blocks)
    out, pull = jax.vjp(lambda a: neuronjax.qkv_cte(**a, **options), arrays)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in out[1:]]
    (grads,) = pull((jnp.ones_like(out[0]), *zeros))
    columns = np.asarray(grads["fused_qkv_weights"])
    assert columns[:, :8].any() and not columns[:, 8:].any()
    if blocks:
        assert grads["slot_mapping"].dtype == jax.dtypes.float0

    def plain(a):
        names = ("k_cache", "v_cache", "slot_mapping", *SCALES)
        rest = {k: v for k, v in a.items() if k not in names}
        kept = {
            k: v for k, v in options.items() if k not in ("use_block_kv", "block_size")
        }
        return neuronjax.qkv_cte(**rest, **kept)[..., :8].sum()

    for name, wanted in jax.grad(plain, allow_int=True)(arrays).items():
        if name in operands(heads=HEADS):
            np.testing.assert_allclose(grads[name], wanted, rtol=1e-4, atol=1e-4)


def test_caches_and_slots_are_arguments_of_a_scan():
    """R-44: they are carried and scanned over, as arrays."""
    arrays, options = caching(shape=(1, 2, 6), blocks=True)
    steps = jnp.arange(6, dtype="int32").reshape(3, 1, 2)

    def step(caches, slots):
        given = dict(arrays, k_cache=caches[0], v_cache=caches[1], slot_mapping=slots)
        q, *caches = neuronjax.qkv_cte(**given, **options)
        return tuple(caches), q

    (k, v), q = jax.lax.scan(step, (arrays["k_cache"], arrays["v_cache"]), steps)
    assert q.shape == (3, 1, 2, 8)
    for got in (bits(k), bits(v)):
        rows = got.reshape(-1, 4)[:6].reshape(3, 2, 4)
        np.testing.assert_array_equal(rows[0], rows[1])
        np.testing.assert_array_equal(rows[0], rows[2])


@pytest.mark.parametrize("blocks", [False, True])
def test_a_donated_cache_is_aliased(blocks):
    arrays, options = caching(blocks=blocks)
    names = ("k_cache", "v_cache")
    caches = tuple(arrays.pop(name) for name in names)

    def run(caches, rest):
        given = dict(zip(names, caches, strict=True)) | rest
        return neuronjax.qkv_cte(**given, **options)[1:]

    compiled = jax.jit(run, donate_argnums=0).lower(caches, arrays).compile()
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased == sum(cache.size for cache in caches)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_symbolic_batch_exports(blocks):
    """R-49."""
    arrays, options = caching(blocks=blocks)
    (b,) = export.symbolic_shape("b")
    batched = ["input", "cos_cache", "sin_cache"]
    batched += ["slot_mapping"] if blocks else ["k_cache", "v_cache"]
    shapes = {
        k: jax.ShapeDtypeStruct((b, *x.shape[1:]) if k in batched else x.shape, x.dtype)
        for k, x in arrays.items()
    }

    def run(a):
        q, k, v = neuronjax.qkv_cte(**a, **options)
        return q, *(jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k, v))

    saved = export.export(jax.jit(run), platforms=["cpu", "tpu", "cuda"])(shapes)
    got = export.deserialize(saved.serialize()).call(arrays)
    for a, wanted in zip(got, jax.jit(run)(arrays), strict=True):
        np.testing.assert_allclose(a, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("blocks", [False, True])
def test_vmap_equals_a_loop(blocks):
    """R-42: one cache each, or one weight for all."""
    arrays, options = caching(blocks=blocks)
    names = ("input", "k_cache", "v_cache")
    stacked = arrays | {k: jnp.stack([arrays[k], arrays[k][::-1]]) for k in names}
    axes = ({k: 0 if k in names else None for k in arrays},)
    run = jax.jit(lambda a: neuronjax.qkv_cte(**a, **options))
    got = jax.vmap(run, axes)(stacked)
    for i in range(2):
        one = run(arrays | {k: stacked[k][i] for k in names})
        for a, b in zip(got, one, strict=True):
            np.testing.assert_array_equal(np.asarray(a[i], "f4"), np.asarray(b, "f4"))


@pytest.mark.parametrize("kind", ["ROW", "STATIC"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("blocks", [False, True])
def test_heads_split_over_a_mesh_with_their_scales_and_caches(
    kind, data, tensor, blocks
):
    """R-43: each device writes the heads that it holds."""
    heads = (4, 2, 4)
    arrays, options = caching(blocks=blocks, heads=heads)
    arrays["fused_qkv_weights"] = arrays["fused_qkv_weights"].astype("float8_e4m3")
    scale = jnp.linspace(0.5, 1.5, 32 if kind == "ROW" else 3, dtype="float32")
    arrays["qkv_w_scale"] = scale[None]
    if kind == "STATIC":
        arrays["qkv_in_scale"] = jnp.full((1, 1), 1 / 32, "float32")
    options |= dict(quantization_type=kind)
    expected = jax.jit(functools.partial(neuronjax.qkv_cte, **options))(**arrays)
    order = ["fused_qkv_weights", "bias"] + (["qkv_w_scale"] if kind == "ROW" else [])
    counts = (heads[0], heads[1], tensor)
    given = arrays | {k: shard_qkv_columns(arrays[k], *counts) for k in order}
    mesh, batch = make_mesh(data=data, tensor=tensor), None if blocks else "data"
    got = sharded_qkv(mesh, batch=batch, **given, **options)
    # The query heads, and the heads of a cache, are in order: a group a device.
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x, "float32") for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
    if blocks and data > 1:
        with pytest.raises(ValueError, match="batch must be None for block caches"):
            sharded_qkv(mesh, batch="data", **given, **options)
