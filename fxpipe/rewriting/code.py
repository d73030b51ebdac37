"""The code of a stage for people: the model's own words, with modules and source lines at the side."""

from __future__ import annotations

import operator

from torch import fx

from fxpipe.rewriting.functions import set_autocast, set_grad
from fxpipe.tracing.printing import expression, source_of

_COLUMN = 88


def stage_code(graph: fx.Graph, index: int) -> str:
    """A stage as the function it is. Parameters and buffers appear under their names in the model."""
    received = [n.name for n in graph.nodes if n.op == "placeholder" and "text" not in n.meta]
    lines = [f"def stage{index}({', '.join(received)}):"]
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        has_value = node.target not in (set_grad, set_autocast, operator.setitem)
        text = f"    {node.name} = {expression(node)}" if has_value else f"    {expression(node)}"
        where = " ".join(part for part in (node.meta.get("module", ""), source_of(node)) if part)
        lines.append(f"{text:<{_COLUMN}}  # {where}" if where else text)
    output = graph.output_node().args[0]
    names = [n.name for n in output if isinstance(n, fx.Node)]  # type: ignore[union-attr]
    return "\n".join([*lines, f"    return {', '.join(names)}"])
