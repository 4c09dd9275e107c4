"""A program that was exported: what a file of it holds."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax import export as jax_export

from neuronjax.primitives import registry
from neuronjax.tools.export.plain import opened, plain_tree

LOADER = """\
import jax.export, pathlib
program = jax.export.deserialize(pathlib.Path({path}).read_bytes())
out = program.call({arguments})"""
_BYTECODE = b"ML\xefR"  # how MLIR's bytecode begins
_ORDERS = ("function", "vjp", "vjp of the vjp")
_COMPOSITE = re.compile(r'stablehlo\.composite "neuron\.(\w+)"')
_FUNCTION = re.compile(r"func\.func private @(\w+)\(")


@dataclasses.dataclass(frozen=True)
class ExportedModule:
    """One StableHLO module of a program.

    Attributes:
        order: 0 for the function itself, 1 for its vector-Jacobian product, and so on.
        text: StableHLO, as MLIR writes it.
        route: `"composite"` where its macros are `stablehlo.composite`s named
            `neuron.<NAME>`, `"inline"` where they are calls of functions named NAME,
            `"none"` where it has none.
        names: the NAMEs of its macros, each once. Inline, a NAME is told from the name
            of any other function by the registry: one of `register_kernel` is known
            where it is registered.
    """

    order: int
    text: str = dataclasses.field(repr=False)
    route: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExportedProgram:
    """A program of `neuronjax.export`; its file is one `jax.export` flatbuffer.

    Attributes:
        blob: the bytes of that file.
    """

    blob: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def exported(self) -> jax_export.Exported:
        """The program as JAX reads it."""
        return jax_export.deserialize(bytearray(self.blob))

    @functools.cached_property
    def modules(self) -> tuple[ExportedModule, ...]:
        """The function's module, and that of each derivative which the file holds.

        Made when asked for: their text spells out whatever the function closes over.
        """
        return tuple(
            _module(order, exported)
            for order, exported in enumerate(_orders(self.exported))
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The NAMEs that the function's module holds; see `ExportedModule`."""
        return self.modules[0].names

    @property
    def route(self) -> str:
        """How the function's module holds them: `"composite"` or `"inline"`."""
        return self.modules[0].route

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms it runs on."""
        return tuple(self.exported.platforms)

    @property
    def vjp_order(self) -> int:
        """How often it can be differentiated."""
        return sum(1 for _ in _orders(self.exported)) - 1

    def call(self, *args: Any) -> Any:
        """Runs the program on this machine's devices.

        Args:
            *args: what the function was exported for; Flax modules and tiles too.

        Returns:
            The outputs, nested in tuples, lists and dicts.

        Raises:
            ValueError: shapes, dtypes or nesting differ from those of the export, or
                the program was not exported for this platform.
        """
        return self.exported.call(*self.arguments(*args))

    @staticmethod
    def arguments(*args: Any) -> tuple:
        """The arguments as a file takes them: tuples, lists and dicts of arrays.

        The parameters of a Flax module become a dict by path, which
        `numpy.savez("weights.npz", **program.arguments(model)[0])` writes.
        """
        return plain_tree(opened(lambda *args: args, args)[1])

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the file, whole or not at all; returns its path.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        path = pathlib.Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent}: expected a folder, none is there")
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(self.blob)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ExportedProgram":
        """Reads a file of `save`, or any other that `jax.export` serialized.

        A program runs whatever its author put there: open those that you trust.

        Raises:
            FileNotFoundError: nothing is at `path`.
            ValueError: the file holds no exported program.
        """
        program = cls(pathlib.Path(path).read_bytes())
        try:
            orders = list(_orders(program.exported))
            if not all(o.mlir_module_serialized[:4] == _BYTECODE for o in orders):
                raise ValueError("no MLIR bytecode")
        # The reader checks nothing: what it stumbles over is of no common class.
        except Exception as error:
            raise ValueError(
                f"{path}: expected a program of neuronjax.export or jax.export, which "
                f"JAX {jax.__version__} cannot read this as: {type(error).__name__}"
            ) from error
        return program

    def loader(self, path: str | os.PathLike[str]) -> str:
        """The lines that run a file of this program with jax and flatbuffers alone."""
        arguments = [name for name, _ in self.inputs]
        top = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in arguments)
        return LOADER.format(path=json.dumps(str(path)), arguments=", ".join(top))

    @property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        """Path and type of each input, such as `("arg0.scale", "f32[64]")`."""
        tree = jax.tree.unflatten(self.exported.in_tree, self.exported.in_avals)
        return tuple(_leaves({f"arg{i}": arg for i, arg in enumerate(tree[0])}))

    @property
    def outputs(self) -> tuple[tuple[str, str], ...]:
        """Path and type of each output."""
        tree = jax.tree.unflatten(self.exported.out_tree, self.exported.out_avals)
        return tuple(_leaves({"out": tree}))

    def __rich__(self) -> Any:
        """The table that `rich` prints."""
        from rich.table import Table  # a picture only: `import neuronjax` stays quick

        title = (
            f"{self.exported.fun_name} for {', '.join(self.platforms)}, "
            f"{len(self.blob) / 1e3:.1f} kB"
        )
        table = Table("", "", title=title, show_header=False, min_width=len(title) + 4)
        table.add_row("inputs", _told(self.inputs))
        table.add_row("outputs", _told(self.outputs))
        if self.exported.nr_devices > 1:
            table.add_row("devices", str(self.exported.nr_devices))
        for module in self.modules:
            order = _ORDERS[min(module.order, len(_ORDERS) - 1)]
            table.add_row(order, _macros(module))
        return table

    def __str__(self) -> str:
        """The table as text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100, color_system=None).print(self)
        return text.getvalue().rstrip()


def _orders(exported: jax_export.Exported) -> Iterator[jax_export.Exported]:
    yield exported
    while exported.has_vjp():
        exported = exported.vjp()
        yield exported


def _module(order: int, exported: jax_export.Exported) -> ExportedModule:
    text = str(exported.mlir_module())
    composites = tuple(dict.fromkeys(_COMPOSITE.findall(text)))
    if composites:
        return ExportedModule(order, text, "composite", composites)
    found = dict.fromkeys(map(_known, _FUNCTION.findall(text)))
    names = tuple(name for name in found if name is not None)
    return ExportedModule(order, text, "inline" if names else "none", names)


def _known(function: str) -> str | None:
    """The NAME of a function; MLIR appends a number to all but the first."""
    for name in (function, re.sub(r"_\d+$", "", function)):
        entry = registry.find(name)
        if entry is not None:
            return entry.name
    return None


def _leaves(tree: Any) -> Iterator[tuple[str, str]]:
    for path, aval in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        yield name, aval.str_short(short_dtypes=True)


def _told(values: tuple[tuple[str, str], ...], ends: int = 3) -> str:
    lines = [f"{name} {kind}".replace("[", r"\[") for name, kind in values]
    if len(lines) > 2 * ends + 1:
        lines[ends:-ends] = [f"... {len(lines) - 2 * ends} more ..."]
    return "\n".join(lines)


def _macros(module: ExportedModule) -> str:
    if module.route == "none":
        return "no macros"
    prefix = "neuron." if module.route == "composite" else ""
    kind = "composites" if prefix else "functions"
    return f"{kind} {', '.join(prefix + name for name in module.names)}"
