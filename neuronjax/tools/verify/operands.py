"""The operands of a NAME: its registered example, larger, or drawn from other keys."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from neuronjax.primitives.macro import Example, MacroFamily

# How many ranks cooperate where an example needs a mesh axis.
RANKS = 2
# What runs once or twice on few elements: compiling it is what takes time.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def example_of(
    family: MacroFamily, label: str, dtype: Any, size: int, seed: int
) -> Example:
    """The example of `label`; another `seed` draws other numbers by the same recipe.

    Raises:
        ValueError: another seed is asked for, and the example draws no numbers.
    """
    found: list[Example] = []

    def build() -> list[Any]:
        found[:] = [family.example(label, jnp.dtype(dtype), size)]
        return jax.tree.leaves(found[0].operands)

    leaves = _evaluate(jax.make_jaxpr(build)(), label, seed)
    tree = jax.tree.structure(found[0].operands)
    operands = jax.tree.unflatten(tree, leaves)
    return dataclasses.replace(found[0], operands=operands)


def _evaluate(closed: ClosedJaxpr, label: str, seed: int) -> list[Any]:
    """Runs a traced example, in one program, with `seed` added to that of each key."""
    seeded = [eqn for eqn in closed.jaxpr.eqns if _is_seed(eqn)]
    if seed and not seeded:
        raise ValueError(
            f"verify: the example of {label} draws no numbers with jax.random: "
            f"expected seed 0, got {seed}"
        )
    rest = [eqn for eqn in closed.jaxpr.eqns if not _is_seed(eqn)]
    variables = [eqn.outvars[0] for eqn in seeded]
    keys = [jax.random.key(int(eqn.invars[0].val) + seed) for eqn in seeded]
    of_keys = closed.jaxpr.replace(invars=variables, eqns=rest)
    run = jaxpr_as_fun(ClosedJaxpr(of_keys, closed.consts))
    return jax.jit(run, compiler_options=QUICKLY)(*keys)


def _is_seed(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "random_seed" and isinstance(eqn.invars[0], Literal)


def on_ranks(fun: Callable[..., tuple], example: Example) -> Callable[..., tuple]:
    """`fun` of all ranks' operands, where its cores cooperate over a mesh axis.

    Raises:
        ValueError: there is one device only.
    """
    if example.axis is None:
        return fun
    devices = jax.devices()
    if len(devices) < RANKS:
        raise ValueError(
            f"verify: expected {RANKS} devices, over which the cores of this macro "
            f"cooperate, got {len(devices)}: set jax_num_cpu_devices"
        )
    axis = example.axis
    mesh = jax.make_mesh((RANKS,), (axis,), (AxisType.Auto,), devices=devices[:RANKS])

    def call(*operands: Any) -> tuple:
        leaves, tree = jax.tree.flatten(operands)

        def rank(*leaves: Any) -> tuple:
            return tuple(fun(*jax.tree.unflatten(tree, leaves)))

        mapped = jax.shard_map(
            rank,
            mesh=mesh,
            in_specs=_specs(example.split, axis),
            out_specs=_specs(example.out_split, axis),
        )
        return jax.jit(mapped)(*leaves)

    return call


def _specs(axes: Sequence[int | None], name: str) -> tuple[P, ...]:
    return tuple(P() if axis is None else P(*[None] * axis, name) for axis in axes)


def settings_of(function: Callable, config: dict[str, Any]) -> dict[str, Any]:
    """Those settings that the function's signature takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in tells nothing
        return config
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return config
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return {key: value for key, value in config.items() if key in names}
