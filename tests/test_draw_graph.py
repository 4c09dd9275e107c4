"""Macro graphs: who reads whose results, what repeats, and where it all lies."""

import functools
import itertools
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import neuronjax
from neuronjax.tools.cli import app
from neuronjax.tools.draw_graph import macro_graph
from neuronjax.tools.draw_graph_fold import Box
from neuronjax.tools.draw_graph_layout import INPUTS, RESULTS, arrange
from neuronjax.tools.trace import Trace
from tests.tiny_checkpoints import random_tensors, write_folder

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
SCALE = jnp.ones(8, jnp.float32)
OTHER = 1e-3


def norm(x, eps=1e-6):
    return neuronjax.rms_norm(x, SCALE, eps=eps)


def graph_of(fun, *args, fold=False):
    return macro_graph(neuronjax.trace(fun, *args), fold_repeated=fold)


def test_an_edge_goes_through_other_operations():
    def diamond(x):
        first = norm(x + 1)
        left, right = norm(first * 2), norm(jnp.sin(first))
        return norm(left + right)

    graph = graph_of(diamond, X)
    assert graph.edges == ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4))
    assert graph.folded.results == (4,)
    assert graph.carried == ()


@pytest.mark.parametrize("seed", range(5))
def test_edges_are_those_that_no_other_path_implies(seed):
    """Random programs, against the reduction of the relation they were drawn from."""
    count, random = 9, np.random.default_rng(seed)
    reads = [random.random(i + 1) < 0.4 for i in range(count)]
    for row in reads:
        row[0] |= not row.any()

    def program(x):
        values = [x]
        for row in reads:
            read = [v for v, used in zip(values, row, strict=True) if used]
            values.append(norm(sum(read[1:], read[0])))
        return values[1:]

    direct = np.zeros((count + 1, count + 1), bool)
    for i, row in enumerate(reads):
        direct[: i + 1, i + 1] = row
    paths = direct.copy()  # of two steps and more
    for k in range(count + 1):
        paths |= np.outer(paths[:, k], paths[k])
    longer = (direct.astype(int) @ paths.astype(int)) > 0
    wanted = sorted(map(tuple, np.argwhere(direct & ~longer)))
    graph = graph_of(program, X)
    assert list(graph.edges) == wanted
    sinks = [n for n in range(1, count + 1) if not direct[n].any()]
    assert list(graph.folded.results) == sinks


def test_a_scan_is_a_box_whose_last_macro_feeds_the_first():
    def five(x):
        def turn(carry, _):
            y = carry + norm(norm(carry), OTHER)
            return y, y.sum()

        carry, sums = lax.scan(turn, norm(x), None, length=5)
        return norm(carry), sums

    graph = graph_of(five, X, fold=True)
    assert graph.folded.items == (1, Box("scan ×5", (2, 3)), 4)
    assert graph.edges == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert graph.carried == ((3, 2),)
    assert graph.folded.results == (4,)
    assert [node.row.count for node in graph.nodes] == [1, 5, 5, 1]


def test_a_carry_that_waits_a_turn_is_followed():
    def swap(x, y):
        def turn(carry, _):
            a, b = carry
            return (b, norm(a)), None

        return lax.scan(turn, (x, norm(y, OTHER)), None, length=4)[0]

    graph = graph_of(swap, X, X)
    assert graph.carried == ((2, 2),)
    assert (1, 2) not in graph.edges, "b reaches norm(a) after a turn, not in the first"
    assert graph.folded.results == (1, 2)


def test_a_scan_over_its_operand_and_its_stack_of_results():
    def each(xs):
        _, ys = lax.scan(lambda c, x: (c, norm(x)), 0.0, norm(xs))
        return norm(ys)

    xs = jax.ShapeDtypeStruct((3, 4, 8), jnp.float32)
    graph = graph_of(each, xs)
    assert graph.edges == ((0, 1), (1, 2), (2, 3)) and graph.carried == ()


def test_loops_branches_and_calls_hand_values_on():
    def program(x, n):
        x = jax.jit(lambda a: norm(a) * 2)(x)  # 1
        x = jax.checkpoint(lambda a: norm(a))(x)  # 2
        x = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, norm(s[1])), (0, x))
        x = lax.cond(n > 2, lambda a: norm(a), lambda a: a, x[1])  # 4
        return norm(x)

    graph = graph_of(program, X, jax.ShapeDtypeStruct((), jnp.int32))
    assert graph.folded.items == (1, 2, Box("while", (3,)), 4, 5)
    # A loop may not turn and a branch not be taken: what was before reaches the next
    # macro too, which follows from the longer way.
    assert graph.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert graph.carried == ((3, 3),)


def test_inside_shard_map_and_custom_derivatives():
    @jax.custom_vjp
    def own(x):
        return norm(x)

    own.defvjp(lambda x: (norm(x), None), lambda _, ct: (ct,))
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    graph = graph_of(jax.shard_map(lambda x: own(norm(x)), **split), X)
    assert graph.edges == ((0, 1), (1, 2))


def layers(x, depth=3):
    for _ in range(depth):
        x = x + norm(norm(x), OTHER)
    return norm(x)


def test_layers_that_repeat_are_drawn_once():
    graph = graph_of(layers, X, fold=True)
    assert graph.folded.items == (Box("×3", (1, 2)), 7)
    assert graph.edges == ((0, 1), (1, 2), (2, 7))
    assert graph.carried == ((2, 1),)
    assert len(graph.nodes) == 7


def test_a_fold_inside_a_loop():
    def nested(x):
        return lax.scan(lambda c, _: (layers(c, 2), None), x, None, length=3)[0]

    graph = graph_of(nested, X, fold=True)
    assert graph.folded.items == (Box("scan ×3", (Box("×2", (1, 2)), 5)),)
    assert graph.carried == ((2, 1), (5, 1))


def test_the_gradient_has_both_passes():
    graph = graph_of(jax.grad(lambda x: layers(x).sum()), X, fold=True)
    names = [node.row.name for node in graph.nodes]
    assert names.count("NeuronReduceMacro") == names.count("NeuronReduceMacroBwd") == 7
    boxes = [item for item in graph.folded.items if isinstance(item, Box)]
    assert [box.title for box in boxes] == ["×3", "×3"]


@pytest.mark.parametrize("gradient", [False, True])
def test_the_graph_counts_as_the_table_does(gradient):
    def program(x):
        turn = lambda c, _: (layers(c, 2), None)  # noqa: E731
        return lax.scan(turn, norm(x), None, length=4)[0].sum()

    trace = neuronjax.trace(jax.grad(program) if gradient else program, X)
    for name in trace.names:
        nodes = [node for node in trace.graph.nodes if node.row.name == name]
        assert sum(node.row.count for node in nodes) == trace.count(name)
    for node, line in zip(trace.graph.nodes, trace.graph.lines, strict=True):
        assert trace.rows[line].config == node.row.config


def test_the_list_tells_operands_and_turns():
    assert str(graph_of(layers, X, fold=True)).splitlines() == [
        "┌ ×3",
        "│   1 NeuronReduceMacro f32[4,8], f32[4,1] ← arguments, ⟲2",
        "│   2 NeuronReduceMacro f32[4,8], f32[4,1] ← 1",
        "└",
        "  7 NeuronReduceMacro f32[4,8], f32[4,1] ← 2",
        "results ← 7",
    ]


def wide(x):
    """Branches of unequal length, edges that skip layers, and a box among them."""
    first = norm(x)
    left = norm(first, OTHER)
    for _ in range(3):
        left = norm(norm(left * 2), OTHER)
    right = norm(first * 3, 1e-4)
    return norm(left + right), norm(x, 1e-2), right


@pytest.mark.parametrize("program", [layers, wide])
@pytest.mark.parametrize("fold", [False, True])
def test_nothing_overlaps_and_lines_end_where_they_lead(program, fold):
    graph = graph_of(program, X, fold=fold)
    layout = arrange(graph.folded, lambda n: (120.0 + 10 * (n % 3), 50.0))
    for frame in [*layout.nodes.values(), *layout.frames]:
        assert 0 <= frame.x and frame.x + frame.width <= layout.width
        assert 0 <= frame.y and frame.y + frame.height <= layout.height
    for one, two in itertools.combinations(layout.nodes.values(), 2):
        assert not _overlap(one, two)
    for frame, box in zip(layout.frames, _boxes(graph.folded.items), strict=True):
        inside = [n for n, node in layout.nodes.items() if _overlap(frame, node)]
        assert sorted(inside) == sorted(box.numbers)
    wanted = sorted(b for _, b in graph.edges)
    wanted += [RESULTS] * len(graph.folded.results)
    tops = {(n.x + n.width / 2, n.y): number for number, n in layout.nodes.items()}
    ends = [tops[line.points[-1]] for line in layout.lines if line.arrow]
    # Lines that enter a box to the same macro become one.
    assert set(ends) == set(wanted) and len(ends) <= len(wanted)
    for line in layout.lines:
        # Straight parts pass between the macros.
        for (x, y), (_, low) in zip(line.points[::2], line.points[1::2], strict=False):
            for node in layout.nodes.values():
                beside = not node.x < x < node.x + node.width
                assert beside or low <= node.y or y >= node.y + node.height
    assert len(layout.loops) == len(graph.carried)
    assert set(layout.nodes) - {INPUTS, RESULTS} == set(_kept(graph.folded.items))


def _overlap(one, two):
    apart = one.x + one.width <= two.x or two.x + two.width <= one.x
    return not (apart or one.y + one.height <= two.y or two.y + two.height <= one.y)


def _boxes(items):
    for item in items:
        if isinstance(item, Box):
            yield item
            yield from _boxes(item.items)


def _kept(items):
    for item in items:
        yield from item.numbers if isinstance(item, Box) else [item]


def test_the_svg_is_xml_of_every_macro(tmp_path):
    file = tmp_path / "graph.svg"
    graph_of(functools.partial(layers, depth=2), X, fold=True).save(file)
    root = ET.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    titles = [t.text for t in root.iter(f"{space}title")]
    assert len(titles) == 3 and "eps = 0.001" in titles[1]
    assert "prefers-color-scheme: dark" in root.find(f"{space}style").text
    words = [t.text for t in root.iter(f"{space}text")]
    assert "×2" in words and words.count("NeuronReduceMacro") == 3
    assert "arguments" in words and "results" in words


def test_the_command_draws_a_macro_and_a_model(tmp_path):
    def invoke(*arguments):
        result = CliRunner().invoke(app, ["draw", "graph", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "RoPEBwd" in invoke("rope_hf", "--gradient")
    folder = write_folder(tmp_path / "model", random_tensors())
    listed = invoke(folder, "--seq", 4)
    assert "prefill, batch 1, 4 tokens" in listed and "┌ ×2" in listed
    assert "┌ ×2" not in invoke(folder, "--seq", 4, "--unfolded")
    file = tmp_path / "graph.svg"
    assert not invoke(folder, "--seq", 4, "--out", file)
    words = [t.text for t in ET.parse(file).getroot().iter() if t.tag.endswith("text")]
    assert "one decode step after 4 tokens" in words
    assert words.count("results") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "RoPE --out graph.png",
            "expected a name that ends in .svg, got graph.png",
        ),
        ("no_such_model", "no_such_model"),
        ("attention_cte", "attention_cte emits several macros: take one of"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    result = CliRunner().invoke(app, ["draw", "graph", *arguments.split()])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("neuronjax: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_table_made_by_hand_has_no_graph():
    with pytest.raises(ValueError, match="a table that neuronjax.trace made"):
        _ = Trace(()).graph
