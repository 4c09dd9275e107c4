"""Macro tables in notebooks that show values with `treescope`."""

from typing import Any

from neuronjax.tools.trace import MacroRow, Trace
from neuronjax.tools.units import with_prefix


def render_trace(trace: Trace, path: str | None, subtree_renderer: Any) -> Any:
    """A line that unfolds: each row a line, which unfolds into the row's settings."""
    from treescope import rendering_parts as parts

    children = []
    for index, row in enumerate(trace.rows):
        where = None if path is None else f"{path}.rows[{index}]"
        children.append(_render_row(row, where, subtree_renderer))
    count = sum(row.count for row in trace.rows)
    total = f"  # {count} macro{'s' * (count != 1)}, {_sums(trace)}"
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(
            parts.maybe_qualified_type_name(Trace),
            "(",
            parts.comment_color(parts.text(total)),
        ),
        children=children,
        suffix=")",
        path=path,
    )


def _render_row(row: MacroRow, path: str | None, subtree_renderer: Any) -> Any:
    from treescope import rendering_parts as parts

    shapes = ", ".join(row.shapes) + " vmap" * row.vmapped
    words = f"{row.count} × {row.name}{' of tiles' if row.tiled else ''} ({shapes})"
    note = parts.comment_color(parts.text(f"  # {_sums(row)}"))
    lines = [
        parts.siblings_with_annotations(f"{key} = ", subtree_renderer(value, path=None))
        for key, value in (("leaf", row.leaf), *row.config)
    ]
    return parts.build_custom_foldable_tree_node(
        label=parts.siblings(words, note),
        contents=parts.fold_condition(expanded=parts.indented_children(lines)),
        path=path,
    )


def _sums(told: MacroRow | Trace) -> str:
    return f"{with_prefix(told.flops, 'FLOP')}, {with_prefix(told.bytes, 'B')}"
