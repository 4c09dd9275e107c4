"""`BIRKernel`: any registered leaf, by its NAME.

Its outputs carry the checkpoint names `bir_kernel_<output>`, as the leaf's family calls
them.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax

from neuronjax.context import fallback
from neuronjax.primitives import contracts, registry
from neuronjax.primitives.contracts import Contract, told
from neuronjax.primitives.macro import Example, MacroFamily

NAME, EMITTER = registry.FALLBACK, "bir_kernel"


@contracts.contracted()
def bir_kernel(kernel_name: str, *operands: Any, **config: Any) -> tuple:
    """Emits `BIRKernel`: the leaf of the NAME `kernel_name`, whichever it is.

    It is the way to a leaf that has no emitter: a backward, or a kernel that another
    package registered. Its gradient is a `BIRKernel` too, of the backward's NAME.

    Args:
        kernel_name: a NAME of the catalog, an alias, or a NAME of `register_kernel`.
        *operands: what that leaf takes, pytrees included, `None` for an absent one. The
            rules of its emitter do not hold here: the leaf takes what its math takes.
        **config: its config bag, whole, as `neuronjax.trace` shows it.

    Returns:
        The leaf's outputs, a tuple also where there is one.

    Raises:
        ValueError: no such NAME; the message lists near matches. Or operands and config
            are not those of the leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> (out,) = bir_kernel("CumSum", jnp.arange(4.0))
        >>> out.tolist()
        [0.0, 1.0, 3.0, 6.0]
    """
    name = registry.resolve_kernel_config(kernel_name).name
    try:
        return bir_family(*operands, name=NAME, kernel_name=name, **config)
    except NotImplementedError:  # a refusal of the leaf's family
        raise
    except Exception as error:  # the leaf checks nothing, anything may come of it
        raise ValueError(
            f"{EMITTER}: the leaf of {name} takes no operands {_shown(operands)} with "
            f"config {config}: {' '.join(str(error).split())}"
        ) from error


def _shown(operands: tuple) -> str:
    types = (
        jax.typeof(x).str_short(short_dtypes=True) for x in jax.tree.leaves(operands)
    )
    return f"({', '.join(types)})"


class _AnyLeaf(MacroFamily):
    """The family of `BIRKernel`: what holds for the leaf's own family holds here."""

    def served(self, config: Mapping[str, Any]) -> MacroFamily:
        return registry.resolve_family(config["kernel_name"])


def _through(form: str) -> Callable[..., tuple]:
    """The leaf of the named family, in one of its forms."""

    def call(*operands: Any, name: str, kernel_name: str, **config: Any) -> tuple:
        family = registry.resolve_family(kernel_name)
        return tuple(getattr(family, form)(*operands, name=kernel_name, **config))

    return call


def _outputs(*, kernel_name: str, **config: Any) -> tuple[str, ...]:
    family = registry.resolve_family(kernel_name)
    names = family.output_names(config)
    return tuple(name.removeprefix(f"{family.family}_") for name in names)


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    bag = dict(config)
    kernel_name = bag.pop("kernel_name")
    family = registry.resolve_family(kernel_name)
    return dict(family.differentiated(bag), kernel_name=kernel_name)


def _emit_backward(operands, outs, cotangents, /, *, name, kernel_name, **config):
    family = registry.resolve_family(kernel_name)
    assert family.backward is not None  # else the leaf's own vjp is taken
    with fallback():
        return family.backward(operands, outs, cotangents, name=kernel_name, **config)


def _example(name: str, dtype: Any, batch: int) -> Example:
    """A leaf that has operands of both kinds and a backward macro."""
    kernel_name = "TopKReduce"
    inner = registry.resolve_family(kernel_name).example(kernel_name, dtype, batch)
    config = dict(inner.config, kernel_name=kernel_name)
    return Example(inner.operands, config, inner.split, inner.out_split)


bir_family = _AnyLeaf(
    "bir_kernel",
    (NAME,),
    _through("leaf"),
    static=_through("static"),
    tangent_leaf=_through("tangent_leaf"),
    plain=_through("plain"),
    outputs=_outputs,
    differentiated=_differentiated,
    backward=_emit_backward,
    reemits=1,
    example=_example,
)


def _near(call: SimpleNamespace) -> str:
    """Nothing for a NAME; for another name those that may have been meant."""
    name = call.kernel_name
    if isinstance(name, str) and registry.find(name) is not None:
        return ""
    return registry.near(name) or "; no NAME is near it"


def _unbound(call: SimpleNamespace) -> str:
    """Why operands and config are not those of the leaf, as its signature says."""
    leaf = registry.resolve_family(call.kernel_name).leaf
    try:
        inspect.signature(leaf).bind(*call.operands, name="", **call.config)
    except TypeError as error:
        return str(error)
    return ""


def _calling(kernel_name: str, **config: Any) -> Callable[[str], dict[str, Any]]:
    return lambda function: dict(config, kernel_name=kernel_name)


def _row(rule: str, message: str, broken: Callable, *args: Any, stage: int = 1) -> None:
    row = Contract(f"{EMITTER}.{rule}", (EMITTER,), message, broken, *args, stage=stage)
    contracts.add(row)


_row(
    "kernel_name",
    "{function}: kernel_name must be a NAME of the catalog or of register_kernel, got "
    "{kernel_name!r}{near}",
    told("near", _near),
    None,
    _calling("RoPe"),
    stage=0,
)
_row(
    "itself",
    "{function}: kernel_name must be the NAME of a leaf, got {kernel_name!r}",
    lambda c: c.kernel_name == NAME,
    None,
    _calling(NAME),
    stage=0,
)
_row(
    "signature",
    "{function}: operands and config must be those of the leaf of {kernel_name}: "
    "{unbound}",
    told("unbound", _unbound),
    None,
    _calling("TopKReduce", tokens=4),
)
