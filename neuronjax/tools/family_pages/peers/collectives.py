"""Collectives of JAX, and the rings that do the same with a product in between."""

from neuronjax.tools.family_pages.peers.peer import Peer

_GROUPS = "ranks `g * tp_degree` to `(g + 1) * tp_degree - 1` are group `g` here"

PEERS = {
    "collectives": (
        Peer(
            "jax.lax.all_gather",
            "fine_grained_allgather",
            (
                ("x", "lhs", "`[m, K]`, this rank's rows"),
                ("axis_name", "axis", ""),
                ("axis_index_groups", "num_groups, tp_degree", _GROUPS),
                ("axis", "", "rows; `axis` here is the mesh's"),
                ("tiled", "", "True: the rows of all ranks are one axis"),
                ("to", "", "typed as varying over `axis`"),
            ),
            "One all-gather there, a ring of permutes here; `allgather_sb2sb` is one "
            "all-gather of columns. `allgather_compute_matmul` is `all_gather(lhs) @ "
            "rhs` without the gathered rows.",
        ),
        Peer(
            "jax.lax.psum_scatter",
            "fine_grained_reduce_scatter",
            (
                ("x", "lhs", "`[tp_degree * m, K]`"),
                ("axis_name", "axis", ""),
                ("axis_index_groups", "num_groups, tp_degree", _GROUPS),
                ("scatter_dimension", "", "0: rows"),
                ("tiled", "", "True"),
            ),
            "Sums travel in float32 here and are rounded once. `matmul_reduce_scatter` "
            "is `psum_scatter(lhs @ rhs)` without the whole product.",
        ),
    ),
}
