"""Llama: a decoder built from `neuronjax.nn`, each block a named macro.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; grouped key/value heads as in
Llama 2.
"""

import functools
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from neuronjax.kernels.linear import linear_fwd
from neuronjax.kernels.stacked import layer_at
from neuronjax.models.cache import Cache
from neuronjax.models.config import DecoderConfig
from neuronjax.models.fused_stack import filled, fused_layers, require_dense
from neuronjax.models.generation import Generates, require_tokens
from neuronjax.models.stacking import stack_layers, unstack_layers
from neuronjax.nn.decoder_layer import DecoderLayer
from neuronjax.nn.norm import RMSNorm
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.rotary import rotary_tables


class Llama(Generates, nnx.Module):
    """A Llama decoder.

    Args:
        config: its sizes.
        scan_layers: keep the layers' weights stacked and scan over them: the layer is
            traced and compiled once. Otherwise `layers` is a list of `DecoderLayer`s.
        fused_stack: run all layers over whole sequences, in a call and in `prefill`, as
            one macro, `Llama3Transformer`, whose backward keeps the input of each layer
            alone. The layers are stacked then. Decoding is as without it.
        dtype: dtype of the computation; `None` keeps that of the parameters.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        scan_layers: bool = False,
        fused_stack: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        scan_layers = scan_layers or fused_stack
        self.config, self.scan_layers, self.dtype = config, scan_layers, dtype
        self.fused_stack = fused_stack
        table, names = (config.vocab_size, config.d_model), ("tensor", None)
        init = nnx.initializers.normal(0.02)
        self.embedding = parameter(init, table, names, rngs, param_dtype)
        self.head = (
            None
            if config.tie_embeddings
            else parameter(init, table, names, rngs, param_dtype)
        )
        types = dict(dtype=dtype, param_dtype=param_dtype)
        self.layers: Any = self._layers(scan_layers, rngs, types)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps, **types, rngs=rngs)

    @staticmethod
    def new_layer(config: Any, rngs: nnx.Rngs, types: dict[str, Any]) -> DecoderLayer:
        """One layer with its initial values."""
        return DecoderLayer(
            config.d_model,
            config.d_ff,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            norm_eps=config.norm_eps,
            rngs=rngs,
            **types,
        )

    def __call__(
        self, tokens: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the next token at every position, float32.

        Args:
            tokens: `[batch, seq]`; position 0 is the first column.
        """
        return self._scores(self.hidden(tokens))

    def hidden(
        self, tokens: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq d_model"]:
        """What the output projection reads at every position, after the last norm.

        `linear_cross_entropy(model.hidden(tokens), model.output_table().T, targets)` is
        the loss of a call's logits, which then never exist.

        Args:
            tokens: `[batch, seq]`; position 0 is the first column.
        """
        x, cos, sin = self._embed(tokens, jnp.zeros(tokens.shape[0], jnp.int32))
        if self.fused_stack:
            return self._finished(fused_layers(self.layers, x, cos, sin))
        if self.scan_layers:
            graph, state = nnx.split(self.layers)
            x, _ = lax.scan(
                lambda x, layer: (nnx.merge(graph, layer)(x, cos, sin), None), x, state
            )
        else:
            for layer in self.layers:
                x = layer(x, cos, sin)
        return self._finished(x)

    def output_table(self) -> Float[Array, "vocab d_model"]:
        """The rows of the output projection: the head, or the tied embedding."""
        table = self.embedding if self.head is None else self.head
        return at_dtype(table, self.dtype)

    def prefill(
        self,
        tokens: Int[Array, "batch seq"],
        lengths: Int[Array, " batch"],
        slots: int,
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Reads prompts into a new cache.

        Args:
            tokens: `[batch, seq]`, padded on the right; ids in [0, vocab_size), which
                `generate` checks: no other id has a row in the embedding.
            lengths: `[batch]`, how many tokens of each row count; at least 1.
            slots: how many tokens the cache holds, at least `seq`.

        Returns:
            The logits after each row's last token, `[batch, vocab]`, and the cache.

        Raises:
            ValueError: there are no tokens, or fewer slots than tokens.
        """
        require_tokens("Llama.prefill", tokens)
        if slots < tokens.shape[1]:
            raise ValueError(
                f"Llama.prefill: slots must be at least seq = {tokens.shape[1]}, "
                f"got {slots}"
            )
        x, cos, sin = self._embed(tokens, jnp.zeros_like(lengths))
        empty = Cache.zeros(
            self.config, tokens.shape[0], slots, dtype=x.dtype, stacked=self.scan_layers
        )
        start = jnp.zeros_like(lengths)
        if self.fused_stack:
            x, *kept = fused_layers(self.layers, x, cos, sin, output_kv=True)
            layers = filled(empty.layers, *kept)
        else:

            def step(layer, x, cache):
                x, key, value = layer.prefill(x, cos, sin)
                return x, cache.write(key, value, start)

            x, layers = self._each(step, x, empty.layers)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], 1)
        return self._logits(last)[:, 0], Cache(layers, lengths)

    def decode(
        self, tokens: Int[Array, "batch seq"], cache: Cache
    ) -> tuple[Float[Array, "batch seq vocab"], Cache]:
        """Reads `seq` more tokens of each row.

        Args:
            tokens: `[batch, seq]`, usually one column; ids as in `prefill`.
            cache: what came before. A row without room for `seq` more tokens keeps its
                slots as they are.

        Returns:
            Logits after each token, `[batch, seq, vocab]`, and the cache with them in
            it.
        """
        x, cos, sin = self._embed(tokens, cache.lengths)

        def step(layer, x, held):
            return layer.decode(x, cos, sin, held, cache.lengths)

        x, layers = self._each(step, x, cache.layers)
        return self._logits(x), Cache(layers, cache.lengths + tokens.shape[1])

    def stacked(self) -> Self:
        """The same model with its layers stacked, to scan over; shares the rest."""
        if self.scan_layers:
            return self
        return self._with(stack_layers(self.layers), scan_layers=True)

    def unstacked(self) -> Self:
        """The same model with a list of layers; shares the rest."""
        if not self.scan_layers:
            return self
        layers = unstack_layers(self.layers, self.config.num_layers)
        return self._with(nnx.List(layers), scan_layers=False)

    def fused(self) -> Self:
        """The same model with `fused_stack`; shares all arrays that are stacked.

        Raises:
            ValueError: a layer is not attention and a dense MLP with plain weights and
                norms, as experts and quantized layers are not.
        """
        require_dense(self.layers if self.scan_layers else self.layers[0])
        stacked = self.stacked()
        copy = stacked._with(stacked.layers, scan_layers=True)
        copy.fused_stack = True
        return copy

    def _with(self, layers, *, scan_layers: bool) -> Self:
        copy = nnx.merge(*nnx.split(self))
        copy.layers, copy.scan_layers = layers, scan_layers
        copy.fused_stack = False
        return copy

    def _layers(self, scan_layers: bool, rngs: nnx.Rngs, types: dict[str, Any]):
        make = functools.partial(self.new_layer, self.config, types=types)
        count = self.config.num_layers
        if not scan_layers:
            return nnx.List([make(rngs) for _ in range(count)])
        stack = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None})
        return stack(rngs.split(count))

    def _embed(self, tokens, start):
        """The embedded tokens, and the rotary tables of their positions."""
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        cos, sin = rotary_tables(
            positions, self.config.head_dim, theta=self.config.rope_theta
        )
        # Without the barrier XLA on a CPU widens a narrow table for both of its uses.
        table = lax.optimization_barrier(at_dtype(self.embedding, self.dtype))
        return table[tokens], cos, sin

    def _each(self, step, x, caches):
        """`step(layer, x, cache) -> (x, cache)` through all layers."""
        if self.scan_layers:
            graph, state = nnx.split(self.layers)

            def body(x, args):
                layer = nnx.merge(graph, layer_at(state, args[0]))
                return step(layer, x, args[1])

            rows = jnp.arange(self.config.num_layers, dtype=jnp.int32)
            return lax.scan(body, x, (rows, caches))
        out = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = step(layer, x, cache)
            out.append(cache)
        return x, tuple(out)

    def _logits(self, x):
        return self._scores(self._finished(x))

    def _finished(self, x):
        """The normed residual stream, in the dtype of the output projection."""
        return self.norm(x).astype(self.output_table().dtype)

    def _scores(self, x):
        table = self.output_table()
        return linear_fwd(x, table.T, dtype=table.dtype)
