"""`neuronjax.export`: a function as a file of StableHLO."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export as jax_export

from neuronjax.context import lowering
from neuronjax.tools.export.plain import Layout, opened, plain_tree
from neuronjax.tools.export.program import ExportedProgram

PLATFORMS = ("cpu", "cuda", "tpu")
KNOWN = ("cpu", "cuda", "rocm", "tpu", "neuron")


def export(
    f: Callable[..., Any],
    *args: Any,
    platforms: str | Sequence[str] = PLATFORMS,
    vjp: bool | int = False,
    symbolic: Any = None,
    composites: bool | None = None,
    custom_calls: Sequence[str] = (),
) -> ExportedProgram:
    """Lowers a function to StableHLO that runs without NeuronJAX; nothing is computed.

    Args:
        f: a public function, an emitter, or a function of your own; settings are closed
            over (`functools.partial(neuronjax.rms_norm, eps=1e-5)`). A Flax NNX module
            is exported with its parameters as a new first argument.
        *args: what it is called with; `jax.ShapeDtypeStruct`s will do, and a Flax
            module, whose parameters are then the argument.
        platforms: where it is to run: of `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"` and
            `"neuron"`.
        vjp: whether the file holds the derivative too, so that its reader can
            differentiate. 2 is the derivative of that as well.
        symbolic: sizes that are left open, as `jax.export.symbolic_args_specs` takes
            them: a string for all of `args` or, nested as they are, one for some and
            `None` for the rest, such as `("b, ...", None)`.
        composites: `True` names macros as `stablehlo.composite`s `neuron.<NAME>`,
            `False` as functions NAME. `None` takes composites where StableHLO can hold
            them, which is one platform and fixed sizes, and functions elsewhere;
            `ExportedProgram.route` says which.
        custom_calls: custom calls that `f` makes and whose stability you answer for,
            such as that of a vendor's kernel; `jax.export` refuses any other.

    Returns:
        The program: `call`, `save`, `names`, `modules`; `print` shows it. Its arguments
        and outputs are nested in tuples, lists and dicts alone.

    Raises:
        ValueError: an unknown platform, an argument that is no array, or composites
            asked for with several platforms or open sizes.
        NotImplementedError: a macro in it has no derivative, or something in it needs
            a fixed size.

    Example:
        >>> import jax, neuronjax
        >>> x = jax.ShapeDtypeStruct((4, 64), "float32")
        >>> scale = jax.ShapeDtypeStruct((64,), "float32")
        >>> program = neuronjax.export(
        ...     neuronjax.rms_norm, x, scale, vjp=True, symbolic=("b, ...", None)
        ... )
        >>> program.inputs
        (('arg0', 'f32[b,64]'), ('arg1', 'f32[64]'))
        >>> [module.names for module in program.modules]
        [('NeuronReduceMacro',), ('NeuronReduceMacro', 'NeuronReduceMacroBwd')]
        >>> neuronjax.export(neuronjax.rms_norm, x, scale, platforms="tpu").route
        'composite'
    """
    platforms = _platforms(platforms)
    title = getattr(f, "__name__", None) or _title(f)
    call, rest = opened(f, args)
    added = len(rest) - len(args)
    rest = (*rest[:added], *_opened_sizes(rest[added:], symbolic))
    leaves = jax.tree.leaves(rest)
    _require_arrays(leaves)
    layout = Layout(rest)

    def program(*plain: Any) -> Any:
        return plain_tree(call(*layout.original(plain)))

    program.__name__ = program.__qualname__ = title
    checks = [jax_export.DisabledSafetyCheck.custom_call(c) for c in custom_calls]
    order = _order(vjp)
    route = _route(composites, platforms, leaves)
    with lowering(route), _open_sizes_told(title, leaves):
        write = jax_export.export(
            jax.jit(program), platforms=platforms, disabled_checks=checks
        )
        # Written here: its derivatives are lowered only when they are written.
        blob = write(*layout.plain(leaves)).serialize(vjp_order=order)
    return ExportedProgram(bytes(blob))


def _title(f: Any) -> str:
    """What a function without a name is called."""
    return getattr(getattr(f, "func", None), "__name__", type(f).__name__)


def _platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    wrong = [name for name in names if name not in KNOWN]
    if wrong or not names or len(set(names)) < len(names):
        hint = "; a GPU is cuda or rocm" if "gpu" in wrong else ""
        raise ValueError(
            f"export: platforms must be some of {KNOWN}, each once, got {names}{hint}"
        )
    return names


def _order(vjp: bool | int) -> int:
    if not isinstance(vjp, int) or vjp < 0:
        raise ValueError(
            "export: vjp must be True, False, or how many derivatives the file holds, "
            f"got {vjp!r}"
        )
    return int(vjp)


def _opened_sizes(args: tuple, symbolic: Any) -> tuple:
    if symbolic is None or not args:
        return args
    _require_arrays(jax.tree.leaves(args))
    return jax_export.symbolic_args_specs(args, symbolic)


def _require_arrays(leaves: Sequence[Any]) -> None:
    for x in leaves:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")) and not isinstance(
            x, int | float
        ):
            raise ValueError(
                "export: arguments must be arrays or jax.ShapeDtypeStructs, got "
                f"{type(x).__name__}: close over settings, as functools.partial does"
            )


@contextlib.contextmanager
def _open_sizes_told(title: str, leaves: Sequence[Any]) -> Iterator[None]:
    """What stumbles over an open size is told as a refusal, not as a fault of ours."""
    try:
        yield
    except (
        AttributeError,
        TypeError,
        jax.errors.InconclusiveDimensionOperation,
    ) as error:
        if not _is_open(leaves):
            raise
        raise NotImplementedError(
            f"export: {title} needs a fixed size where an open one stands: {error}"
        ) from error


def _is_open(leaves: Sequence[Any]) -> bool:
    sizes = [size for x in leaves for size in getattr(x, "shape", ())]
    return any(map(jax_export.is_symbolic_dim, sizes))


def _route(
    composites: bool | None, platforms: Sequence[str], leaves: Sequence[Any]
) -> str:
    is_open = _is_open(leaves)
    fits = len(platforms) == 1 and not is_open
    if composites and not fits:
        why = "open sizes" if is_open else f"platforms {platforms}"
        raise ValueError(
            "export: composites=True must come with fixed sizes and one platform, got "
            f"{why}: export once for each, or take composites=None"
        )
    return "composite" if fits and composites is not False else "inline"
