"""`attention_bwd` with its options, from the float64 reference's output and lse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax.emit import attention_kernel, backwards_attention_kernel
from tests.attention_case import error
from tests.attention_equations import Attention, visible


@dataclasses.dataclass(frozen=True)
class Backward:
    """Sizes `(B, Hq, Hk, Sq, Sk, d)` and options; `bias` names its whole axes."""

    sizes: tuple[int, int, int, int, int, int]
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    sinks: int | None = None  # how many; 0 is one of them in a 2-D array
    bias: str | None = None
    cap: float | None = None
    bounds: bool = False
    tiles: bool = True
    mixed: bool = False

    def rows(self):
        """Every third row's segment is empty."""
        first = np.arange(self.sizes[3]) // 50 * 50
        return first, np.where(np.arange(self.sizes[3]) % 3 == 1, first, first + 40)

    def arrays(self, dtype):
        """`q`, `k`, `v`, `dy` with the sequence second, `sinks` and `bias`."""
        batch, heads, kv_heads, q_seq, kv_seq, d = self.sizes
        rng = np.random.default_rng(q_seq + kv_seq)
        rows, keys = (batch * heads, q_seq, d), (batch * kv_heads, kv_seq, d)
        shapes = dict(q=rows, k=keys, v=keys, dy=rows)
        arrays = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
        if self.sinks is not None:
            shape = (batch, heads, self.sinks) if self.sinks else (batch, heads)
            arrays["sinks"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
        if self.bias is not None:
            whole = zip("hqk", (batch * heads, q_seq, kv_seq), strict=True)
            shape = tuple(n if a in self.bias else 1 for a, n in whole)
            arrays["bias"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
        return arrays

    def reference(self, arrays):
        batch, heads, _, q_seq, kv_seq, d = self.sizes
        bounds = self.rows() if self.bounds else None
        seen = visible(q_seq, kv_seq, self.causal, window=self.window, bounds=bounds)
        sinks = arrays.get("sinks")
        return Attention(
            *(arrays[n] for n in "qkv"),
            seen,
            d**-0.5 if self.scale is None else self.scale,
            cap=self.cap,
            bias=arrays.get("bias"),
            sink=None if sinks is None else np.reshape(sinks, (batch * heads, -1)),
        )

    def call(self, arrays, out, lse):
        """Gradients by the reference's names and shapes."""
        batch, heads, kv_heads = self.sizes[:3]
        counts = dict(q=heads, k=kv_heads, v=kv_heads, dy=heads)
        refs = {f"{n}_ref": x for n, x in arrays.items() if n not in counts}
        for name, x in dict({n: arrays[n] for n in counts}, o=out).items():
            unfolded = x.reshape(batch, counts.get(name, heads), *x.shape[1:])
            refs[f"{name}_ref"] = jnp.swapaxes(unfolded, 2, 3)
        stored = neuronjax.statistics_to_tiles(lse) if self.tiles else lse
        refs["lse_ref"] = stored.reshape(batch, heads, *stored.shape[1:])
        options = {}
        if self.bounds:
            bounds = (jnp.asarray(x, jnp.float32) for x in self.rows())
            options = dict(zip(("bound_min", "bound_max"), bounds, strict=True))
        got = neuronjax.attention_bwd(
            **refs,
            use_causal_mask=self.causal,
            mixed_precision=self.mixed,
            softmax_scale=self.scale,
            sliding_window=self.window,
            logits_soft_cap=self.cap,
            **options,
        )
        names = [n for n in ("q", "k", "v", "sinks", "bias") if n in arrays]
        grads = dict(zip(names, got, strict=True))
        for name in "qkv":
            grads[name] = jnp.swapaxes(jax.lax.collapse(grads[name], 0, 2), 1, 2)
        return grads

    def wanted(self, arrays):
        grads = self.reference(arrays).gradients(np.asarray(arrays["dy"], np.float64))
        if "sink" in grads:
            grads["sinks"] = grads.pop("sink").reshape(arrays["sinks"].shape)
        return grads

    def stored(self, arrays, dtype):
        """The reference's output and log-sum-exp, rounded."""
        out, *_, lse = self.reference(arrays).outputs()
        return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)


CASES = dict(
    groups=Backward((2, 6, 2, 128, 128, 4)),
    window=Backward((1, 2, 2, 384, 384, 3), window=100, sinks=3),
    one_sink=Backward((2, 2, 1, 128, 128, 3), window=7, sinks=0, scale=-0.7),
    bounds=Backward((1, 2, 1, 256, 256, 3), bounds=True, sinks=1, scale=2.0),
    packed=Backward((1, 1, 1, 256, 256, 3), bounds=True, causal=False),
    bias=Backward((1, 2, 1, 256, 300, 3), causal=False, bias="qk", scale=0.3),
    odd=Backward((2, 3, 1, 77, 301, 5), False, sinks=1, bias="h", cap=1.5, tiles=False),
    wide=Backward((1, 1, 1, 128, 128, 256), sinks=2, bias="hk", tiles=False),
)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_option(name):
    """R-07, R-10, R-11: sinks keep their own shape, a bias its own."""
    case = CASES[name]
    arrays = case.arrays(jnp.float32)
    got = jax.jit(case.call)(arrays, *case.stored(arrays, jnp.float32))
    wanted = case.wanted(arrays)
    assert set(got) == set(wanted)
    for label, x in got.items():
        assert x.shape == arrays[label].shape and x.dtype == arrays[label].dtype
        assert error(x, wanted[label]) <= 2e-5, label


def test_scale_zero_is_zero():
    """R-11: equal weights, and nothing for q and k."""
    case = dataclasses.replace(CASES["groups"], scale=0.0)
    arrays = case.arrays(jnp.float32)
    got = case.call(arrays, *case.stored(arrays, jnp.float32))
    assert not got["q"].any() and not got["k"].any()
    assert error(got["v"], case.wanted(arrays)["v"]) <= 1e-5


def test_both_layouts_of_the_log_sum_exp_are_one():
    case = CASES["window"]
    arrays = case.arrays(jnp.float32)
    stored = case.stored(arrays, jnp.float32)
    forms = case, dataclasses.replace(case, tiles=False)
    for a, b in zip(*(f.call(arrays, *stored).values() for f in forms), strict=True):
        np.testing.assert_array_equal(a, b)


def _plain(case, arrays, out, lse):
    """The paper's equations with bfloat16 arrays throughout."""
    group = arrays["q"].shape[0] // arrays["k"].shape[0]
    dtype = out.dtype
    q, dy = arrays["q"], arrays["dy"]
    k, v = (jnp.repeat(arrays[n], group, 0) for n in "kv")
    scale = jnp.asarray(q.shape[2] ** -0.5, dtype)
    seen = visible(*q.shape[1:2], k.shape[1], case.causal, window=case.window)
    p = jnp.where(seen, jnp.exp(scale * q @ k.mT - lse.astype(dtype)), 0)
    ds = p * (dy @ v.mT - jnp.sum(dy * out, -1, keepdims=True))
    grads = dict(q=scale * ds @ k, k=scale * ds.mT @ q, v=p.mT @ dy)
    for n in "kv":
        grads[n] = grads[n].reshape(-1, group, *grads[n].shape[1:]).sum(1)
    return grads


@pytest.mark.parametrize("mixed", [False, True])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(mixed):
    case = Backward((1, 4, 2, 256, 256, 16), window=200, mixed=mixed)
    arrays = case.arrays(jnp.bfloat16)
    stored = case.stored(arrays, jnp.bfloat16)
    wanted = case.wanted(arrays)
    got = jax.jit(case.call)(arrays, *stored)
    plain = jax.jit(functools.partial(_plain, case))(arrays, *stored)
    assert all(x.dtype == jnp.bfloat16 for x in got.values())
    errors = [{n: error(x[n], wanted[n]) for n in "qkv"} for x in (got, plain)]
    assert all(errors[0][n] <= 2 * errors[1][n] for n in "qkv"), errors


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_no_row_saw_may_hold_anything(bad):
    """Keys outside every segment, and all of the rows whose segment is empty."""
    case = CASES["packed"]
    arrays = case.arrays(jnp.float32)
    out, lse = case.stored(arrays, jnp.float32)
    first, end = case.rows()
    empty, column = first == end, np.arange(256)
    hidden = ~((first[:, None] <= column) & (column < end[:, None])).any(0)
    assert 0 < empty.sum() < 256 and 0 < hidden.sum() < 256
    assert np.isneginf(lse[:, empty]).all()
    run = jax.jit(case.call)
    wanted = run(arrays, out, lse)
    spoilt = {n: x.at[:, empty].set(bad) for n, x in arrays.items() if n in ("q", "dy")}
    spoilt |= {n: arrays[n].at[:, hidden].set(bad) for n in "kv"}
    got = run(spoilt, out.at[:, empty].set(bad), lse)
    for label, x in wanted.items():
        assert error(got[label], x) <= 1e-6, label
        rows = empty if label == "q" else hidden
        assert not np.asarray(got[label])[:, rows].any()


def test_a_row_that_saw_nothing_has_no_gradient():
    """R-01: with the numbers of its other row."""
    case = Backward((1, 1, 1, 2, 2, 1), causal=False, tiles=False, scale=1.0, bias="qk")
    shape = (1, 2, 1)
    arrays = {n: jnp.array(x).reshape(shape)
              for n, x in dict(q=[1.0, 1], k=[1.0, 2], v=[3.0, 5]).items()}  # fmt: skip
    arrays["dy"] = jnp.array([1.0, 1e30]).reshape(shape)
    arrays["bias"] = jnp.array([[[0.0, 0.0], [-jnp.inf, -jnp.inf]]])
    out, lse = case.stored(arrays, jnp.float32)
    np.testing.assert_allclose(out.ravel(), [4.462117, 0], rtol=1e-6)
    got = case.call(arrays, out, lse)
    wanted = dict(q=[0.393224, 0], k=[-0.393224, 0.393224], v=[0.268941, 0.731059])
    for label, x in wanted.items():
        np.testing.assert_allclose(got[label].ravel(), x, rtol=1e-5)
    bias = got["bias"].ravel()
    np.testing.assert_allclose(bias, [-0.393224, 0.393224, 0, 0], rtol=1e-5)


def test_the_emitters_take_a_sink():
    """Masked forward and backward; row 2 sees nothing."""
    rng = np.random.default_rng(6)
    shapes = (4, 5, 3), (2, 7, 3), (2, 7, 2), (4, 1), (4, 5, 2)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    q, k, v, sink, d_out = arrays
    mask = jnp.asarray(rng.random((1, 5, 7)) < 0.6).at[:, 2].set(False)
    whole = Attention(q, k, v, np.asarray(mask), sink=sink)
    options = dict(sink=sink, tp_q=True)
    outs = attention_kernel(q, k.mT, v, mask, cache_softmax=True, **options)
    for got, wanted in zip(outs, whole.outputs()[:3], strict=True):
        assert error(got, wanted) <= 1e-6
    out, *rows = outs
    args = q, k.mT, v, out, d_out, *rows, mask
    dq, dk, dv, d_sink = backwards_attention_kernel(*args, **options)
    wanted = whole.gradients(np.asarray(d_out))
    for label, got in dict(q=dq, k=dk.mT, v=dv, sink=d_sink).items():
        assert error(got, wanted[label]) <= 1e-5, label


def test_the_backward_has_derivatives():
    """Of every array it reads, in float64, by differences."""
    with jax.enable_x64(True):
        case = Backward((1, 2, 1, 3, 4, 2), causal=False, sinks=2, bias="k", cap=2.0)
        case = dataclasses.replace(case, tiles=False)
        arrays = {n: x.astype(jnp.float64) for n, x in case.arrays(jnp.float64).items()}
        out, *_, lse = map(jnp.asarray, case.reference(arrays).outputs())
        check_grads(jax.jit(case.call), (arrays, out, lse), 1, eps=1e-5)
