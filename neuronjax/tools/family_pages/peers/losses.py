"""Losses over a vocabulary."""

from neuronjax.tools.family_pages.peers.peer import Peer

_INDEX = "-100 by default there; here None, so that every target is a class"
_TORCH = (
    ("reduction", "reduction", "the same words, the same default"),
    ("ignore_index", "ignore_index", _INDEX),
    ("label_smoothing", "label_smoothing", "the same meaning"),
    (
        "weight",
        "weights",
        "of each CLASS there, of each token here: `weight[target]`; with smoothing the "
        "two differ",
    ),
)

PEERS = {
    "cross_entropy": (
        Peer(
            "optax.softmax_cross_entropy_with_integer_labels",
            "cross_entropy",
            (
                ("logits", "logits", ""),
                ("labels", "targets", "integers on both sides"),
                ("axis", "", "classes are the last axis; `axis` here is a mesh's"),
                ("where", "weights", "of classes there; a logit of -inf is no class"),
            ),
            'The loss of each token there: `reduction="none"`; the default here is '
            '`"mean"`.',
        ),
        Peer(
            "optax.smooth_labels",
            "cross_entropy",
            (
                ("labels", "targets", "one-hot there; integers here"),
                ("alpha", "label_smoothing", "the same meaning"),
                ("axis", "", "the last one"),
                ("where", "", ""),
            ),
        ),
        Peer(
            "torch.nn.functional.cross_entropy",
            "cross_entropy",
            (
                ("input", "logits", "classes are axis 1 there, the last one here"),
                ("target", "targets", "class indices; no probabilities"),
                *_TORCH,
                ("size_average, reduce", "reduction", "deprecated there"),
            ),
        ),
        Peer(
            "torch.nn.LinearCrossEntropyLoss",
            "nn.LinearCrossEntropy",
            (
                ("in_features", "d_model", ""),
                ("num_classes", "vocab", ""),
                ("reduction", "reduction", ""),
                ("ignore_index", "ignore_index", "None for none on both sides"),
                ("label_smoothing", "label_smoothing", ""),
                ("dtype", "param_dtype", ""),
                ("weight", "weights", "of each class there; of each token in the call"),
                ("out_features, bias, device", "", ""),
                ("options", "block_size", "how much exists at a time"),
            ),
        ),
        Peer(
            "tokamax.linear_softmax_cross_entropy_loss",
            "linear_cross_entropy",
            (
                ("x", "x", ""),
                ("labels", "targets", ""),
                ("weights", "w", "`[H, V]` on both sides; `weights` here is a token's"),
                ("reduction", "reduction", '`"sum"` by default there'),
                ("precision", "", "`jax.default_matmul_precision`"),
                ("implementation", "", ""),
            ),
        ),
    ),
}
