"""One optimiser step and one scoring, compiled for the mesh of a run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from neuronjax.tools.train.blueprint import Blueprint, Params
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.objective import next_token_loss


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clipped gradient; the rate is warmed up and ends at a tenth.

    Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. Norms do not decay.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0 if config.warmup_steps else config.learning_rate,
        config.learning_rate,
        config.warmup_steps,
        config.steps,
        end_value=config.learning_rate / 10,
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=_decays)
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def _decays(params: Params) -> Params:
    def matrix(path: Any, _: Any) -> bool:
        return not any("norm" in str(part) for part in path)

    return jax.tree_util.tree_map_with_path(matrix, params)


class Stepping:
    """The compiled functions of a run.

    Args:
        blueprint: of the run.

    Attributes:
        step: `(params, moments, windows) -> (params, moments, metrics)`; the first two
            are donated. Metrics are `loss`, `balance` and `norm`, the gradient's length
            before it is clipped.
        score: `(params, windows, weights) -> loss`.
        shardings: where moments lie, by their structure; None without a mesh.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self._optimizer = optimizer(blueprint.config)
        self.shapes = jax.eval_shape(self._optimizer.init, blueprint.shapes)
        self.shardings = self._shardings()
        rest, rows = blueprint.replicated(), blueprint.rows()
        state = (blueprint.shardings, self.shardings)
        self.step: Any = jax.jit(
            self._step,
            in_shardings=(*state, rows),
            out_shardings=(*state, rest),
            donate_argnums=(0, 1),
        )
        self.score: Any = jax.jit(
            self._score, in_shardings=(blueprint.shardings, rows, rows)
        )

    def moments(self, params: Params) -> Any:
        """The optimiser's state before the first step."""
        init = jax.jit(self._optimizer.init, out_shardings=self.shardings)
        return init(params)

    def gradient(self, params: Params, windows: jax.Array) -> Any:
        """`((total, (loss, balance)), gradient)`; `neuronjax.trace` reads it."""
        return jax.value_and_grad(self._objective, has_aux=True)(params, windows)

    def _objective(self, params: Params, windows: jax.Array) -> Any:
        model = self.blueprint.model(params)
        loss, balance = next_token_loss(model, self.blueprint.mesh, windows)
        weight = jnp.asarray(self.blueprint.config.balance, balance.dtype)
        return loss + weight * balance, (loss, balance)

    def _step(self, params: Params, moments: Any, windows: jax.Array) -> Any:
        (_, (loss, balance)), grads = self.gradient(params, windows)
        metrics = dict(loss=loss, balance=balance, norm=optax.tree.norm(grads))
        # Adam's bias correction raises a float to an integer count.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self._optimizer.update(grads, moments, params)
            updated = optax.apply_updates(params, updates)
        return updated, moments, metrics

    def _score(self, params: Params, windows: jax.Array, weights: jax.Array) -> Any:
        model = self.blueprint.model(params)
        return next_token_loss(model, self.blueprint.mesh, windows, weights)[0]

    def _shardings(self) -> Any:
        """Moments lie as their weights do, counters everywhere."""
        if self.blueprint.mesh is None:
            return None
        rest = self.blueprint.replicated()
        return optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            self.shapes,
            self.blueprint.shardings,
            transform_non_params=lambda _: rest,
        )
