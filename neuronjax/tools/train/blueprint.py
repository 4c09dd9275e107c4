"""What a configuration builds: the decoder, its mesh, and where each weight lies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.models.moe_config import MoEConfig
from neuronjax.models.moe_lm import MoELM
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.placement import fitting_spec
from neuronjax.tools.train.config import VOCAB, TrainConfig

Params = dict[str, Any]


class Blueprint:
    """The decoder of a run, apart from its weights.

    Args:
        config: of the run.
        spread: over the mesh of `config`; otherwise the decoder is for one device,
            with the same weights.

    Attributes:
        mesh: the devices, or None where there is one.
        shardings: where each weight lies, by name; None without a mesh.
    """

    def __init__(self, config: TrainConfig, *, spread: bool = True) -> None:
        self.config, self.mesh = config, None
        if spread and config.devices > 1:
            self.mesh = make_mesh(explicit=False, lnc=config.lnc, **config.mesh_sizes)
        abstract = nnx.eval_shape(self._build)
        self._graph, self._state = nnx.split(abstract)
        self.shapes: Params = nnx.to_pure_dict(self._state)
        self.shardings = None if self.mesh is None else self._shardings(self.mesh)

    def params(self) -> Params:
        """The first weights: those of the seed, whatever the mesh."""
        make = jax.jit(lambda: nnx.to_pure_dict(nnx.state(self._build())))
        params = make()
        if self.shardings is None:
            return params
        return jax.device_put(params, self.shardings)

    def model(self, params: Params) -> Llama:
        """The decoder with these weights."""
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)

    def replicated(self) -> NamedSharding | None:
        """Whole on every device."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    def rows(self) -> NamedSharding | None:
        """Windows divided over the devices that split the batch."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(ROWS))

    def _build(self) -> Llama:
        c = self.config
        types = dict(dtype=jnp.dtype(c.dtype), param_dtype=jnp.float32)
        options: dict[str, Any] = dict(scan_layers=True, rngs=nnx.Rngs(c.seed), **types)
        sizes = decoder_config(c)
        if isinstance(sizes, MoEConfig):
            over = {} if self.mesh is None else dict(mesh=self.mesh, batch="data")
            return MoELM(sizes, **over, **options)
        return Llama(sizes, **options)

    def _shardings(self, mesh: Mesh) -> Params:
        specs = nnx.to_pure_dict(nnx.get_partition_spec(self._state))
        place = functools.partial(_sharding, mesh)
        return jax.tree.map(place, self.shapes, specs)


# The mesh axes that split windows.
ROWS = ("data", "expert")


def decoder_config(c: TrainConfig) -> LlamaConfig | MoEConfig:
    """The sizes of the decoder."""
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB,
        d_model=c.d_model,
        d_ff=c.d_ff,
        num_layers=c.layers,
        num_heads=c.heads,
        num_kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        tie_embeddings=True,
        max_seq=c.seq,
    )
    if not c.experts:
        return LlamaConfig(**sizes)
    return MoEConfig(
        **sizes,
        num_experts=c.experts,
        experts_per_token=c.experts_per_token,
        shared_d_ff=c.shared_d_ff,
    )


def _sharding(mesh: Mesh, shape: jax.ShapeDtypeStruct, spec: P) -> NamedSharding:
    """As the layers name it; the two cores of a rank divide its share once more."""
    finer = P(*(_with_cores(name, mesh) for name in spec))
    for names in (finer, spec):
        fitting = fitting_spec(shape.shape, names, mesh)
        if any(fitting):
            return NamedSharding(mesh, fitting)
    return NamedSharding(mesh, P())


def _with_cores(name: Any, mesh: Mesh) -> Any:
    return ("tensor", "lnc") if name == "tensor" and "lnc" in mesh.axis_names else name
