"""Macro tables in notebooks that show values with `treescope`."""

from typing import Any

from neuronjax.tools.trace import Trace


def render_trace(trace: Trace, path: str | None, subtree_renderer: Any) -> Any:
    """A line that unfolds: each row a line, which unfolds into the row's settings."""
    from treescope import rendering_parts as parts

    children = []
    for index, row in enumerate(trace.rows):
        shapes = ", ".join(row.shapes) + " vmap" * row.vmapped
        words = f"{row.count} × {row.name} {'tiles' if row.tiled else ''}({shapes})"
        numbers = f"  # {row.flops / 1e6:.3g} MFLOP, {row.bytes / 1e6:.3g} MB"
        where = None if path is None else f"{path}.rows[{index}]"
        label = parts.siblings(words, parts.comment_color(parts.text(numbers)))
        settings = dict(leaf=row.leaf, **dict(row.config))
        shown = parts.indented_children(
            [
                parts.siblings_with_annotations(
                    f"{key} = ", subtree_renderer(value, path=None)
                )
                for key, value in settings.items()
            ]
        )
        contents = parts.fold_condition(expanded=shown)
        children.append(
            parts.build_custom_foldable_tree_node(
                label=label, contents=contents, path=where
            )
        )
    count = sum(row.count for row in trace.rows)
    total = f"{count} macros, {trace.flops / 1e6:.3g} MFLOP, {trace.bytes / 1e6:.3g} MB"
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(
            parts.maybe_qualified_type_name(Trace),
            "(",
            parts.comment_color(parts.text(f"  # {total}")),
        ),
        children=children,
        suffix=")",
        path=path,
    )
