"""What other libraries call the same things: their arguments and ours.

One module a group of families. `tests/test_family_pages.py` holds names of JAX, Flax
and optax against the installed libraries. PyTorch, tokamax and transformers are not
installed with the tests, and no test sees their names: those of PyTorch 2.13 and
tokamax 0.0.12 are the parameters of their signatures.
"""

from neuronjax.tools.family_pages.peers import (
    attention,
    collectives,
    experts,
    losses,
    models,
    norms,
    projections,
    small_families,
)
from neuronjax.tools.family_pages.peers.peer import Peer as Peer
from neuronjax.tools.family_pages.table import code, table

_MODULES = (
    attention,
    projections,
    norms,
    experts,
    losses,
    small_families,
    collectives,
    models,
)

# By the slug of the family's page.
PEERS: dict[str, tuple[Peer, ...]] = {
    slug: peers for module in _MODULES for slug, peers in module.PEERS.items()
}


def peer_sections(slug: str) -> list[str]:
    """The tables of a page: for each function of another library, its arguments."""
    peers = PEERS.get(slug, ())
    parts = ["## From another library"] if peers else []
    for peer in peers:
        head = (f"`{peer.name}`", f"`{peer.ours}`", "what to mind")
        parts.append(peer.note)
        parts.append(table(head, [_row(*row) for row in peer.rows]))
    return parts


def _row(theirs: str, ours: str, note: str) -> tuple[str, str, str]:
    return code(theirs.split(", ")), code(ours.split(", ")) if ours else "none", note
