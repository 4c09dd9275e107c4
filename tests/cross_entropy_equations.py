"""The loss in NumPy and float64, from the equations of the documentation alone.

    lse_t = log sum_v exp(x_tv)
    loss_t = lse_t - (1 - eps) x_{t, y_t} - eps / V sum_v x_tv + zeta lse_t^2
    dx_tv = c_t [(1 + 2 zeta lse_t) exp(x_tv - lse_t) - (1 - eps) [v = y_t] - eps / V]

`c_t` is what the reduction makes of token `t`: `w_t`, divided by the sum of the weights
of the tokens that count for a mean; 0 for a token that does not.
"""

import numpy as np


def log_sum_exp(x):
    """Row by row, with the largest taken out."""
    largest = x.max(axis=-1)
    base = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        return base + np.log(np.exp(x - base[..., None]).sum(axis=-1))


def token_losses(x, targets, eps=0.0, zeta=0.0):
    """`(loss, lse)` of each row of a matrix."""
    x = np.asarray(x, np.float64)
    lse = log_sum_exp(x)
    losses = []
    for row, total, target in zip(x, lse, targets, strict=True):
        linear = (1 - eps) * row[target] + (eps * row.mean() if eps else 0)
        losses.append(total - linear + zeta * total**2)
    return np.array(losses), lse


def shares(targets, weights=None, ignore_index=None, reduction="mean"):
    """`c_t` of each token."""
    share = np.ones(len(targets)) if weights is None else np.array(weights, np.float64)
    if ignore_index is not None:
        share = np.where(np.asarray(targets) == ignore_index, 0, share)
    if reduction == "mean":
        return share / share.sum() if share.sum() else share
    return share


def loss_and_gradient(
    x,
    targets,
    *,
    label_smoothing=0.0,
    z_loss=0.0,
    weights=None,
    ignore_index=None,
    reduction="mean",
):
    """The reduced loss of `[tokens, V]` logits, and the gradient of its sum."""
    x, eps = np.asarray(x, np.float64), label_smoothing
    share = shares(targets, weights, ignore_index, reduction)
    counts = np.ones(len(x), bool)
    if ignore_index is not None:
        counts = np.asarray(targets) != ignore_index
    places = np.where(counts, targets, 0)
    x = np.where(counts[:, None], x, 0)
    losses, lse = token_losses(x, places, eps, z_loss)
    each = share * losses
    label = places[:, None] == np.arange(x.shape[1])
    label = (1 - eps) * label + eps / x.shape[1]
    softmax = np.exp(x - lse[:, None])
    grad = share[:, None] * ((1 + 2 * z_loss * lse)[:, None] * softmax - label)
    return each if reduction == "none" else each.sum(), grad


def linear_loss_and_gradients(x, w, targets, **options):
    """The loss of the logits `x w`; the gradients of both factors."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    loss, g = loss_and_gradient(x @ w, targets, **options)
    return loss, g @ w.T, x.T @ g
