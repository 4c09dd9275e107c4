"""The list of the families' pages."""

from neuronjax.tools.family_pages.families import FAMILY_PAGES
from neuronjax.tools.family_pages.page import GENERATED
from neuronjax.tools.family_pages.peers import PEERS
from neuronjax.tools.family_pages.table import code, table


def index_page() -> str:
    """The table of all pages, and where each name of another library is explained."""
    head = ("family", "functions", "layers", "macros")
    rows = [
        (
            f"[{page.title}]({page.slug}.md)",
            code(page.functions),
            code(f"nn.{layer}" for layer in page.layers),
            code((*page.names, *page.gradients)),
        )
        for page in FAMILY_PAGES
    ]
    titles = {page.slug: page.title for page in FAMILY_PAGES}
    peers = [
        (f"`{peer.name}`", f"`{peer.ours}`", f"[{titles[slug]}]({slug}.md)")
        for slug, some in PEERS.items()
        for peer in some
    ]
    tree = "\n".join(page.slug for page in FAMILY_PAGES)
    return "\n\n".join(
        [
            "# Families",
            GENERATED,
            table(head, rows),
            "## From another library",
            table(("there", "here", "its arguments"), sorted(peers)),
            f"```{{toctree}}\n:hidden:\n\n{tree}\n```\n",
        ]
    )
