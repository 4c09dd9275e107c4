"""The families' pages: nothing is missing, and the names of other libraries exist."""

import importlib
import inspect
import pathlib

import jax
import pytest

import neuronjax
from neuronjax import emit, nn
from neuronjax.primitives import contracts, registry
from neuronjax.tools import tables
from neuronjax.tools.family_pages import FAMILY_PAGES, arguments
from neuronjax.tools.family_pages.peers import PEERS
from neuronjax.tools.family_pages.public import public
from neuronjax.tools.trace import trace
from tests.macro_case import MacroCase, loss

DOCS = pathlib.Path(__file__).parents[1] / "docs"
ALL_PEERS = [(slug, peer) for slug, peers in PEERS.items() for peer in peers]
# The libraries that every environment of the tests has.
INSTALLED = ("jax", "flax", "optax")


def _all(field):
    return [name for page in FAMILY_PAGES for name in getattr(page, field)]


def _functions(module):
    return {n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}


def test_every_function_stands_on_one_page():
    functions, emitters = _all("functions"), _all("emitters")
    assert len({*functions}) == len(functions)
    assert {*emitters} == _functions(emit) and len({*emitters}) == len(emitters)
    kept = {*contracts.FUNCTIONS} - {*emitters}
    assert kept <= {*functions} <= _functions(neuronjax)


def test_every_function_of_arrays_stands_on_a_page():
    arrays = {
        name
        for name in _functions(neuronjax)
        if any(a.is_operand for a in arguments.arguments(getattr(neuronjax, name)))
    }
    assert arrays <= {*_all("functions")}


def test_every_name_and_every_layer_stands_on_a_page():
    assert {*_all("names"), *_all("gradients")} == {*registry.CATALOG}
    layers = {name for name, layer in vars(nn).items() if inspect.isclass(layer)}
    assert {*_all("layers")} == layers


def test_every_refusal_stands_on_a_page():
    pages = "".join(tables.PAGES[f"families/{p.slug}.md"]() for p in FAMILY_PAGES)
    lost = [row for row in contracts.CONTRACTS if f"| {row} |" not in pages]
    assert not lost


def test_every_argument_of_a_page_is_explained():
    untold = [
        f"{name}: {argument.name}"
        for name in (*_all("functions"), *_all("emitters"))
        for argument in arguments.arguments(public(name))
        if not argument.meaning
    ]
    assert not untold


def test_no_page_of_a_family_that_is_gone_is_left():
    files = {f"families/{path.name}" for path in (DOCS / "families").iterdir()}
    assert files <= {*tables.PAGES}


def test_an_option_shows_its_default_and_its_values():
    options = {a.name: a for a in arguments.arguments(neuronjax.mlp)}
    values = arguments.values(options["activation_fn"].annotation)
    assert values == "`SiLU`, `GELU`, `GELU_Tanh_Approx`, `Swish`"
    page = tables.PAGES["families/mlp.md"]()
    assert f"| `activation_fn` | `SiLU` | {values} |" in page
    assert "| `up_proj_weights_tensor` | " in page


def test_an_option_that_refuses_says_so():
    assert "sbm" in arguments.refused_options(neuronjax.mlp)
    assert "| `mlp` | `sbm` | sbm = " in tables.PAGES["families/mlp.md"]()


@pytest.mark.parametrize("page", FAMILY_PAGES, ids=lambda page: page.slug)
def test_gradients_emit_what_the_page_says(page):
    emitted = set()
    # One NAME of each primitive: they share its rules.
    for name in {registry.family_of(name): name for name in page.names}.values():
        case = MacroCase(name)
        if case.family.no_derivative is None and case.live:
            call = loss(case.of_floats(case.macro))
            gradient = jax.grad(call, tuple(range(len(case.live))))
            emitted |= {*trace(gradient, *case.live).names}
    assert emitted - {*page.names} == {*page.gradients}


@pytest.mark.parametrize(
    ("slug", "peer"), ALL_PEERS, ids=lambda x: getattr(x, "name", x)
)
def test_our_names_in_a_peers_table_are_arguments(slug, peer):
    assert slug in {page.slug for page in FAMILY_PAGES}
    known = _parameters(public(peer.ours))
    for _, ours, _ in peer.rows:
        for name in filter(None, ours.split(", ")):
            function, _, argument = name.rpartition(".")
            there = _parameters(public(function)) if function else known
            assert argument in there, f"{peer.ours} has no {name}"


@pytest.mark.parametrize(
    "peer",
    [p for _, p in ALL_PEERS if p.name.split(".")[0] in INSTALLED],
    ids=lambda peer: f"{peer.name} {peer.ours}",
)
def test_a_peers_table_has_all_of_its_arguments(peer):
    told = {name for row in peer.rows for name in row[0].split(", ")}
    found = _imported(peer.name)
    # Of a layer the constructor. A `custom_vjp` is an object without a signature.
    found = found.__init__ if inspect.isclass(found) else getattr(found, "fun", found)
    real = _parameters(found)
    assert told - {*peer.newer} <= real <= told


def _imported(name):
    """What a dotted name means: an attribute wins over a module of the same name."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:end]))
        found = getattr(found, part)
    return found


def _parameters(found):
    """What a function takes, or a layer: its constructor and its call."""
    calls = [found.__init__, found.__call__] if inspect.isclass(found) else [found]
    names = {name for call in calls for name in inspect.signature(call).parameters}
    return names - {"self", "args", "kwargs"}
