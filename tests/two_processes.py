"""A program that runs as one process or as several; `test_two_processes` compares.

Each process has some of the devices of one mesh. All run the same lines, and process 0
writes what they found.

    python -m tests.two_processes out.npz --devices 4
    python -m tests.two_processes out.npz --devices 2 --processes 2 --process 0 \
        --coordinator localhost:12345
    python -m tests.two_processes out.npz --devices 2 --processes 2 --process 1 \
        --coordinator localhost:12345
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax import allgather_compute_matmul
from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.models.mesh_decoder import MeshDecoder
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.placement import place

CONFIG = LlamaConfig(
    vocab_size=24,
    d_model=16,
    d_ff=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_seq=64,
)
STEPS = 3


def start(processes: int, process: int, devices: int, coordinator: str) -> None:
    """Makes the devices, and joins the other processes."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process)


def laid(mesh, spec, values) -> jax.Array:
    """A global array of which each process makes only the parts of its own devices."""
    values = np.asarray(values)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])


def everywhere(x) -> np.ndarray:
    """The whole of a global array, on every process."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def training() -> dict[str, np.ndarray]:
    """The losses and the weights of a few steps on a data x tensor mesh."""
    mesh = make_mesh(data=2, tensor=2)
    model = Llama(CONFIG, scan_layers=True, rngs=nnx.Rngs(0))
    place(model, mesh)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 9), np.int32)
    tokens = laid(mesh, P("data"), tokens)
    graph, state = nnx.split(model)
    optimizer = optax.sgd(0.3, momentum=0.9)

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def step(state, memory, tokens):
        value, grads = jax.value_and_grad(loss)(state, tokens)
        updates, memory = optimizer.update(grads, memory, state)
        return optax.apply_updates(state, updates), memory, value

    memory, losses = jax.jit(optimizer.init)(state), []
    for _ in range(STEPS):
        state, memory, value = step(state, memory, tokens)
        losses.append(everywhere(value))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    weights = {f"weight {jax.tree_util.keystr(k)}": everywhere(x) for k, x in leaves}
    return weights | {"losses": np.stack(losses)}


def ring() -> dict[str, np.ndarray]:
    """The ring over all devices, both ways round, and its gradients.

    The right factor is divided by columns, or whole on every rank.
    """
    mesh, rng = make_mesh(tensor=4), np.random.default_rng(1)
    rows = laid(mesh, P("tensor"), rng.standard_normal((8, 5), np.float32))
    columns = rng.standard_normal((5, 12), np.float32)
    found = {}
    for both_ways in (False, True):
        for kind, spec in (("divided", P(None, "tensor")), ("whole", P())):

            def product(lhs, rhs, both_ways=both_ways):
                return allgather_compute_matmul(lhs, rhs, 4, 1, bidirectional=both_ways)

            def loss(lhs, rhs, spec=spec, product=product):
                out = jax.shard_map(
                    product,
                    mesh=mesh,
                    in_specs=(P("tensor"), spec),
                    out_specs=P(None, "tensor"),
                )(lhs, rhs)
                return jnp.sum(jnp.sin(out)), out

            pulled = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
            (d_rows, d_columns), out = pulled(rows, laid(mesh, spec, columns))
            arrays = dict(out=out, d_rows=d_rows, d_columns=d_columns)
            found |= {
                f"ring {kind} {both_ways} {name}": everywhere(x)
                for name, x in arrays.items()
            }
    return found


def generation() -> dict[str, np.ndarray]:
    """Tokens of a decoder whose ranks are on several processes; ranks of two cores."""
    found = {}
    for ranks, cores in ((4, 1), (2, 2)):
        config = dataclasses.replace(CONFIG, num_kv_heads=ranks)
        model = Llama(config, scan_layers=True, rngs=nnx.Rngs(1))
        decoder = MeshDecoder(model, make_mesh(tensor=ranks, lnc=cores))
        made = decoder.generate([[1, 2, 3], [4]], max_tokens=5)
        found[f"tokens {ranks} {cores}"] = np.array(made)
    return found


def main() -> None:
    """Runs everything and writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    given = parser.parse_args()
    start(given.processes, given.process, given.devices, given.coordinator)
    found = training() | ring() | generation()
    found["devices"] = np.array([jax.device_count(), jax.local_device_count()])
    if jax.process_index() == 0:
        np.savez(given.out, **found)


if __name__ == "__main__":
    main()
