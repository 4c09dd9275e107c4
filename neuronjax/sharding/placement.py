"""Places the parameters of an NNX module on a mesh, by their partition names."""

import math

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def place(module: nnx.Module, mesh: Mesh) -> None:
    """Moves every parameter of `module` onto `mesh`, in place.

    An axis is split over the mesh axis that its partition name says, where the mesh has
    that axis and its size divides; elsewhere it stays whole on every device. A small
    model then runs on any number of devices, with what fits of it divided.

    Args:
        module: any NNX module; a parameter's names are its `out_sharding`.
        mesh: the devices.
    """
    state = nnx.state(module)
    specs = nnx.get_partition_spec(state)

    def move(value: jax.Array, spec: PartitionSpec) -> jax.Array:
        fitting = fitting_spec(value.shape, spec, mesh)
        return jax.device_put(value, NamedSharding(mesh, fitting))

    nnx.update(module, jax.tree.map(move, state, specs))


def fitting_spec(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """`spec` without the names that `mesh` lacks or whose size does not divide."""
    names = (*spec, *(None for _ in shape))[: len(shape)]
    return PartitionSpec(
        *(
            name if _divides(name, size, mesh) else None
            for name, size in zip(names, shape, strict=True)
        )
    )


def _divides(name: str | tuple[str, ...] | None, size: int, mesh: Mesh) -> bool:
    parts = (name,) if isinstance(name, str) else name or ()
    if not set(parts) <= set(mesh.axis_names):
        return False
    return size % math.prod(mesh.shape[part] for part in parts) == 0
