"""A decoder whose every step is one `transformer_tkg` over the devices of a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from neuronjax.models import mesh_step
from neuronjax.models.cache import Cache
from neuronjax.models.generation import Generates, require_tokens
from neuronjax.models.llama import Llama
from neuronjax.models.mesh_packing import (
    packed_layer,
    require_division,
    require_plain,
    table_axes,
    two_cores,
    weight_spec,
)
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.parameter import at_dtype
from neuronjax.sharding.mesh import laid, require_axes

# New tokens that prefill reads at once.
CHUNK = 128
# The mask's last slots stand for the new tokens, so that a row whose slots are all
# filled needs one more to read a token. A step that reads more tokens than this at once
# copies the cache to one with room for them, and back.
SPARE = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeshCache(Cache):
    """A `Cache` whose arrays have slots to spare, and a part on each rank.

    Attributes:
        layers: keys `[batch, num_kv_heads, head_dim, slots + 1]` and values, the heads
            divided over ranks; stacked as in `Cache`.
        lengths: `[batch]`, how many slots of each row are filled.
    """

    @property
    def slots(self) -> int:
        """How many tokens a row can hold."""
        return super().slots - SPARE


class MeshDecoder(Generates, nnx.Module):
    r"""A `Llama` or `MoELM` that reads prompts and generates over a mesh.

    $$h \mathrel{+}= \sum_r \mathrm{Attention}_r(h), \qquad
      h \mathrel{+}= \sum_r \mathrm{MLP}_r(h)$$

    in each layer, the sums over the ranks of `axis`: all of a step is one
    `transformer_tkg` in a `shard_map`. A rank has whole key heads with their query
    heads and their part of the cache, and a part of the MLP's columns (of every
    expert's, where there are experts), filled up with zeros. Of two cores on `lnc` each
    has half of the rank's columns in the MLP and of those behind attention. Embedding
    and output projection are divided along the vocabulary, over both axes or over the
    ranks, where that divides; else they are whole everywhere, as norms and routers are.

    Prompts are read like new tokens, 128 at once. There is no gradient to `model`: the
    weights are packed once, here.

    What crosses the wire, a step: two all-reduces a layer over `axis`; over `lnc` two
    all-gathers and a reduce-scatter a layer; one all-reduce for the embedding where it
    is divided. Its logits are divided alike; what reads them all gathers them.

    Args:
        model: the decoder; its projections not quantized.
        mesh: the devices; other axes hold everything whole.
        axis: the mesh axis of the ranks.
        lnc: the mesh axis of a rank's two cores; unless named `"lnc"`, where the mesh
            has one. An axis of one device is none.
        scan_layers: keep the weights stacked and scan over the layers; else they are
            traced one by one, with the same result. A step on a CPU holds a copy of
            the slots that it reads, of one layer in a scan, of all in a list.
        sbuf_residual_and_cc: the path of the residual in `transformer_tkg`: each core
            sums its own half over the ranks, and the halves are exchanged then.

    Raises:
        ValueError: the mesh lacks an axis, or `lnc` is not one of two cores beside
            `axis`; the ranks do not divide the key heads, or the cores the width; or a
            layer is of other blocks.

    Source:
        Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.

    Example:
        >>> from neuronjax.models.config import LlamaConfig
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> config = LlamaConfig(vocab_size=9, d_model=8, d_ff=6, num_layers=1,
        ...                      num_heads=2, num_kv_heads=1, head_dim=4)
        >>> model = Llama(config, rngs=nnx.Rngs(0))
        >>> decoder = MeshDecoder(model, make_mesh(tensor=1))
        >>> model.generate([[1, 2]], max_tokens=3) == decoder.generate(
        ...     [[1, 2]], max_tokens=3)
        True
    """

    def __init__(
        self,
        model: Llama,
        mesh: Mesh,
        *,
        axis: str = "tensor",
        lnc: str | None = None,
        scan_layers: bool = True,
        sbuf_residual_and_cc: bool = False,
    ):
        lnc = "lnc" if lnc is None and "lnc" in mesh.axis_names else lnc
        require_axes("MeshDecoder", mesh, axis=axis, lnc=lnc)
        lnc = two_cores("MeshDecoder", mesh, axis, lnc)
        require_division("MeshDecoder", mesh, model.config, axis, lnc)
        self.config, self.mesh, self.scan_layers = model.config, mesh, scan_layers
        axes = table_axes(mesh, model.config.vocab_size, axis, lnc)
        ranks, in_sbuf = mesh.shape[axis], sbuf_residual_and_cc
        self.layout = mesh_step.Layout(axis, ranks, lnc, axes, in_sbuf)
        dtype = model.dtype
        self.embedding = self._placed(at_dtype(model.embedding, dtype), P(axes or None))
        self.head = (
            None
            if model.head is None
            else self._placed(at_dtype(model.head, dtype), P(axes or None))
        )
        self.norm = self._placed(at_dtype(model.norm.scale, dtype), P())
        model = model.stacked() if scan_layers else model.unstacked()
        layers = [model.layers] if scan_layers else list(model.layers)
        packed = [self._packed(layer, dtype) for layer in layers]
        self.layers: Any = packed[0] if scan_layers else nnx.List(packed)

    def prefill(
        self,
        tokens: Int[Array, "batch seq"],
        lengths: Int[Array, " batch"],
        slots: int,
    ) -> tuple[Float[Array, "batch vocab"], MeshCache]:
        """Reads prompts into a new cache; see `Llama.prefill`."""
        require_tokens("MeshDecoder.prefill", tokens)
        batch, seq = tokens.shape
        if slots < seq:
            raise ValueError(
                f"MeshDecoder.prefill: slots must be at least seq = {seq}, got {slots}"
            )
        x = jnp.zeros((batch, self.config.d_model), self.embedding[...].dtype)
        carry = x, self._empty(batch, slots)
        size = min(seq, CHUNK)
        whole = seq // size
        carry = self._chunk(carry, tokens[:, :size], lengths, 0, 0)
        if whole > 1:
            chunks = tokens[:, size : whole * size].reshape(batch, whole - 1, size)
            starts = size * jnp.arange(1, whole, dtype=jnp.int32)
            prior = (whole - 1) * size

            def step(carry, chunk):
                return self._chunk(carry, chunk[0], lengths, chunk[1], prior), None

            carry, _ = lax.scan(step, carry, (chunks.swapaxes(0, 1), starts))
        if rest := seq - whole * size:
            carry = self._chunk(
                carry, tokens[:, -rest:], lengths, seq - rest, seq - rest
            )
        last, layers = carry
        return self._logits(last[:, None])[:, 0], MeshCache(layers, lengths)

    def decode(
        self, tokens: Int[Array, "batch seq"], cache: Cache
    ) -> tuple[Float[Array, "batch seq vocab"], MeshCache]:
        """Reads `seq` more tokens of each row; see `Llama.decode`."""
        require_tokens("MeshDecoder.decode", tokens, cache)
        start, slots = cache.lengths, cache.slots
        x, layers = self._hidden(tokens, start, cache.layers, slots, slots)
        return self._logits(x), MeshCache(layers, start + tokens.shape[1])

    def _chunk(self, carry, tokens, lengths, start, prior):
        """Reads a chunk of every prompt; keeps the last tokens that are in it."""
        last, layers = carry
        seq, slots = tokens.shape[1], mesh_step.slots_of(layers) - SPARE
        starts = jnp.full(lengths.shape, start, jnp.int32)
        x, layers = self._hidden(tokens, starts, layers, slots, prior)
        place = lengths - 1 - start
        here = (place >= 0) & (place < seq)
        row = jnp.take_along_axis(x, jnp.where(here, place, 0)[:, None, None], 1)
        return jnp.where(here[:, None], row[:, 0], last), layers

    def _hidden(self, tokens, start, layers, slots, prior):
        """`mesh_step.hidden_states` of embedded tokens, over the mesh."""
        layout, cache_spec = self.layout, self._cache_spec()

        def local(table, weights, tokens, start, layers):
            x = mesh_step.embedded_tokens(table, tokens, layout.table_axes)
            return mesh_step.hidden_states(
                *(weights, x, start, layers),
                config=self.config,
                layout=layout,
                slots=slots,
                prior=prior,
            )

        weights, weight_specs = self._weights()
        specs = P(layout.table_axes or None), weight_specs, P(), P(), cache_spec
        arrays = self.embedding[...], weights, tokens, start, layers
        return self._over_mesh(local, specs, (P(), cache_spec), arrays)

    def _logits(self, x):
        """The logits, divided along the vocabulary like the output projection."""
        table = P(self.layout.table_axes or None)
        head = self.embedding if self.head is None else self.head
        return self._over_mesh(
            functools.partial(mesh_step.next_logits, eps=self.config.norm_eps),
            (P(), P(), table),
            P(None, None, *table),
            (x, self.norm[...], head[...]),
        )

    def _over_mesh(self, local, in_specs, out_specs, arrays):
        arrays = laid(self.mesh, arrays, in_specs)
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return mapped(*arrays)

    def _weights(self):
        """The arrays of the layers and their specs."""

        def spec(name, x):
            return weight_spec(name, x.ndim, self.layout.axis, self.layout.lnc)

        stacks = [self.layers] if self.scan_layers else list(self.layers)
        arrays = [{name: w[...] for name, w in layer.items()} for layer in stacks]
        specs = [{name: spec(name, x) for name, x in own.items()} for own in arrays]
        return (arrays[0], specs[0]) if self.scan_layers else (arrays, specs)

    def _cache_spec(self):
        lead = (None, None) if self.scan_layers else (None,)
        spec: Any = P(*lead, self.layout.axis)
        layer = LayerCache(spec, spec)
        return layer if self.scan_layers else (layer,) * self.config.num_layers

    def _empty(self, batch: int, slots: int):
        """The layers of an empty cache, on the devices."""
        empty = Cache.zeros(
            self.config,
            batch,
            slots + SPARE,
            dtype=self.embedding[...].dtype,
            stacked=self.scan_layers,
        )
        specs = self._cache_spec()
        if AxisType.Explicit in self.mesh.axis_types:
            return laid(self.mesh, empty.layers, specs)
        places = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        return lax.with_sharding_constraint(empty.layers, places)

    def _packed(self, layer, dtype) -> nnx.Dict:
        """The weights of a layer, each part on its device."""
        require_plain("MeshDecoder", layer)
        axis, lnc = self.layout.axis, self.layout.lnc
        parts = self.layout.ranks * (1 if lnc is None else self.mesh.shape[lnc])
        return nnx.Dict(
            {
                name: self._placed(w, weight_spec(name, w.ndim, axis, lnc))
                for name, w in packed_layer(layer, parts, dtype).items()
            }
        )

    def _placed(self, value: jax.Array, spec: P) -> nnx.Param:
        return nnx.Param(jax.device_put(value, NamedSharding(self.mesh, spec)))
