"""Calls of `moe_cte`: operands, programs, a plain formula, stored cases."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import neuronjax
from tests.arrays import array
from tests.moe_equations import FLOATS, PRE, live_slots, most_blocks, slots_of

FOLDER = pathlib.Path(__file__).parent / "cases"
LIMITS = [f"{w}_clamp_{s}_limit" for w in ("gate", "up") for s in ("upper", "lower")]
# Numbers that every dtype holds.
CLAMPS = dict(zip(LIMITS, (0.625, -0.375, 0.5, -0.25), strict=True))


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options; `clamps` are the four limits in the order of `LIMITS`."""

    tokens: int = 11
    experts: int = 3
    k: int = 2
    block: int = 4
    width: int = 8
    inner: int = 6
    blocks: int | None = None
    skip_token: bool = False
    bias: bool = False
    clamps: tuple[float | None, ...] = (None,) * 4
    scaling: str = "POST_SCALE"
    activation: str = "SiLU"
    accumulate: bool = True
    implementation: str = "shard_on_i"

    @property
    def rows(self):
        return self.tokens + (not self.skip_token)

    @property
    def padding(self):
        return -1 if self.skip_token else self.tokens

    @property
    def count(self):
        """Blocks: enough for any routing, unless given."""
        pairs = self.tokens * self.k
        return self.blocks or most_blocks(pairs, self.experts, self.block)

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the call, as the reference reads them."""
        return dict(
            block_size=self.block,
            skip_token=self.skip_token,
            activation_function=self.activation,
            is_tensor_update_accumulating=self.accumulate,
            expert_affinities_scaling_mode=self.scaling,
            **dict(zip(LIMITS, self.clamps, strict=True)),
        )

    def index(self, seed=0):
        """Distinct experts of each token; more than there are name none, `experts`."""
        rng = np.random.default_rng(seed + 17)
        k = min(self.k, self.experts)
        index = [rng.permutation(self.experts)[:k] for _ in range(self.tokens)]
        index = np.reshape(index, (self.tokens, k)).astype(np.int32)
        return np.pad(index, ((0, 0), (0, self.k - k)), constant_values=self.experts)

    def routed(self, index):
        """Ids and experts of the blocks."""
        sizes = self.experts, self.block, self.padding, self.count
        ids, experts = slots_of(index, *sizes)
        return dict(token_position_to_id=ids, block_to_expert=experts)

    def floats(self, index, dtype="float32", seed=0):
        """The operands with a gradient, by argument name."""
        rng = np.random.default_rng(seed)
        E, H, I = self.experts, self.width, self.inner  # noqa: E741
        shapes = (self.rows, H), (self.rows * E, 1), (E, H, 2, I), (E, I, H)
        shapes += ((E, 2, I), (E, H)) if self.bias else ()
        names = FLOATS[: len(shapes)]
        arrays = {n: rng.normal(size=s) for n, s in zip(names, shapes, strict=True)}
        arrays["gate_up_proj_weight"] /= H**0.5
        arrays["down_proj_weight"] /= I**0.5
        routed = np.zeros((self.rows, E), bool)
        for t, row in enumerate(index):
            routed[t, [e for e in row if 0 <= e < E]] = True
        arrays["expert_affinities_masked"] *= routed.reshape(-1, 1)
        arrays["hidden_states"][self.tokens :] = 0
        return {n: array(x, dtype) for n, x in arrays.items()}

    def call(self, floats, rest, **options):
        """`moe_cte` of these operands."""
        settings = self.settings | options
        skip = neuronjax.SkipMode(skip_token=settings.pop("skip_token"))
        spec = spec_of(self.implementation, settings)
        return neuronjax.moe_cte(**floats, **rest, spec=spec, skip_dma=skip, **settings)

    def stored(self, floats, rest, **options):
        """Output and both checkpoints."""
        return self.call(floats, rest, checkpoint_activation=True, **options)

    def formula(self, floats, rest):
        """The equations over all slots at once, in the operands' dtype throughout."""
        ids, experts = rest["token_position_to_id"], rest["block_to_expert"]
        return formula(self, floats, ids, experts)

    def cotangents(self, dtype="float32", seed=5):
        """Of the output and both checkpoints."""
        rng = np.random.default_rng(seed)
        blocks = self.count
        shapes = (self.rows, self.width), (blocks, 2, self.inner, self.block)
        shapes += ((blocks, self.block, self.width),)
        return tuple(array(rng.normal(size=s), dtype) for s in shapes)

    def filled(self, rest, cotangents):
        """The cotangents with zeros where a slot is empty."""
        live = live_slots(self.settings | rest, self.tokens)
        d_out, d_gate_up, d_down = cotangents
        d_gate_up = d_gate_up * live[:, None, None, :].astype(d_gate_up.dtype)
        return d_out, d_gate_up, d_down * live[..., None].astype(d_down.dtype)


def spec_of(implementation, settings):
    """The dispatcher's argument; takes the options that it holds."""
    inner = {
        name: settings.pop(name)
        for name in [x.name for x in dataclasses.fields(neuronjax.ShardOnIConfig)]
        if name in settings
    }
    config = neuronjax.ShardOnIConfig(**inner) if inner else None
    return neuronjax.MoECTESpec(implementation, shard_on_I=config)


ALL = tuple(CLAMPS.values())
CASES = dict(
    plain=Case(),
    clamps=Case(bias=True, clamps=ALL, activation="Swish"),
    one_sided=Case(bias=True, clamps=(0.375, None, None, -0.25), skip_token=True),
    gelu=Case(activation="GELU", clamps=(None, None, 0.5, None), tokens=1, k=1),
    gelu_tanh=Case(activation="GELU_Tanh_Approx", experts=1, k=1, skip_token=True),
    pre_scale=Case(scaling="PRE_SCALE", bias=True, clamps=ALL),
    pre_scale_delayed=Case(scaling="PRE_SCALE_DELAYED", implementation="shard_on_i"),
    no_scale=Case(scaling="NO_SCALE", bias=True, skip_token=True),
    more_choices_than_experts=Case(experts=2, k=4, bias=True, activation="Swish"),
    odd_sizes=Case(tokens=13, experts=5, k=3, block=3, width=7, inner=5, blocks=17),
    many_experts=Case(tokens=3, experts=24, k=2, block=2, skip_token=True),
    slots_of_one=Case(tokens=5, block=1, bias=True),
    overwrite=Case(accumulate=False, clamps=ALL),
    overwrite_one=Case(accumulate=False, k=1, skip_token=True, scaling="NO_SCALE"),
)


def formula(case, floats, ids, experts):
    """Output, gate and up, down: gathers, products and one scatter, in plain jnp."""
    x, a, gate_up, down, *biases = [floats[n] for n in FLOATS if n in floats]
    dtype, blocks = x.dtype, ids.size // case.block
    live = (ids >= 0) & (ids < case.tokens)
    live = live if case.accumulate else live & _is_last(ids)
    t, e = jnp.where(live, ids, 0), jnp.repeat(experts.reshape(-1), case.block)
    none = jnp.zeros((), dtype)
    a = jnp.where(live, a[t * case.experts + e, 0], none)[:, None]
    x = jnp.where(live[:, None], x[t], none)
    x = x * a if case.scaling in PRE else x
    z = jnp.einsum("sh,shci->sci", x, gate_up[e])
    z = z + biases[0][e] if biases else z
    for which, upper, lower in ((0, *case.clamps[:2]), (1, *case.clamps[2:])):
        side = z[:, which]
        if upper is not None:
            side = jnp.where(side < upper, side, jnp.asarray(upper, dtype))
        if lower is not None:
            side = jnp.where(side > lower, side, jnp.asarray(lower, dtype))
        z = z.at[:, which].set(side)
    m = _act(z[:, 0], case.activation) * z[:, 1]
    y = jnp.einsum("si,sih->sh", m, down[e])
    y = y + biases[1][e] if biases else y
    added = y * a if case.scaling == "POST_SCALE" else y
    added = jnp.where(live[:, None], added, none)
    out = jnp.zeros((case.rows, case.width), dtype).at[t].add(added)
    some = live.reshape(blocks, -1).any(1)[:, None, None]
    z = z.reshape(blocks, case.block, 2, -1).transpose(0, 2, 3, 1)
    y = y.reshape(blocks, case.block, -1)
    return out, jnp.where(some[..., None], z, none), jnp.where(some, y, none)


def _act(x, kind):
    if kind in ("SiLU", "Swish"):
        return x / (1 + jnp.exp(-(1.702 if kind == "Swish" else 1.0) * x))
    if kind == "GELU":
        return x * (1 + jax.scipy.special.erf(x / 2**0.5)) / 2
    return x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


def _is_last(ids):
    """Whether no later slot has the same id."""
    later = jnp.triu(ids[:, None] == ids[None, :], 1)
    return ~later.any(1)


@functools.cache
def program(case, options=()):
    """Outputs and gradients of `(floats, rest, cotangents)`, compiled once.

    Without stored checkpoints in the outputs the first cotangent alone counts. The
    `options` are pairs for the call, or "formula" for the plain formula.
    """

    def fun(floats, rest):
        if options == "formula":
            return case.formula(floats, rest)
        return case.call(floats, rest, **dict(options))

    @jax.jit
    def run(floats, rest, cotangents):
        outs, pull = jax.vjp(lambda floats: fun(floats, rest), floats)
        if not isinstance(outs, tuple):
            return (outs,), pull(cotangents[0].astype(outs.dtype))[0]
        seeds = (c.astype(x.dtype) for c, x in zip(cotangents, outs, strict=True))
        return outs, pull(tuple(seeds))[0]

    return run


def exact(case, floats, rest, cotangents):
    """Outputs and gradients of the plain formula in float64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, "float64"), (floats, cotangents))
        outs, grads = program(case, "formula")(wide[0], rest, wide[1])
    return jax.tree.map(np.asarray, (outs, grads))


def compare(got, wanted, rtol=1e-5):
    """Trees of arrays, each relative to the largest number wanted of it."""
    pairs = zip(*map(jax.tree.leaves_with_path, (got, wanted)), strict=True)
    for (path, a), (_, b) in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (path, a.shape, b.shape)
        size = np.abs(b).max(initial=0) or 1
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * size, err_msg=str(path))


def stored_cases(family):
    """Name, options, inputs and outputs of each stored case."""
    index = json.loads((FOLDER / family / "index.json").read_text())
    for case in index["cases"]:
        with np.load(FOLDER / family / case["file"]) as data:
            inputs, outputs = (
                {n: data[x["array"]] for n, x in case[which].items() if x}
                for which in ("inputs", "outputs")
            )
        yield case["name"], case["options"], inputs, outputs
