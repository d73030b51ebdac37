"""Values that only the stages know: forward has read them, and its graph holds where they are the same.

No guard can ask for them before a step (`guards`), and where the model itself reads them, not a module of it, there is
nothing to keep whole. So, where no other way is left, the graph reads them again, in its stage, for each micro-batch. A
micro-batch for which forward would decide otherwise is an error of its step, and never a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxpipe.errors import DecisionError
from fxpipe.tracing.traced import Traced


def same_answer(have: Any, want: Any) -> bool:
    """Equal, and nan equal to itself; arrays are compared as lists."""
    if isinstance(have, list) and isinstance(want, list):
        return len(have) == len(want) and all(map(same_answer, have, want))
    return bool(type(have) is type(want) and (have == want or (have != have and want != want)))


def expect(value: Any, expected: Any, what: str) -> None:
    """A node of the graph.

    Raises:
        DecisionError: forward has read another value when it was traced.
    """
    if not same_answer(value, expected):
        raise DecisionError(
            f"forward decides by {what}, which is {value!r} for these samples; it was {expected!r} when the model was "
            "traced, and the pipeline runs what forward does then. Keep the decision in tensors (torch.where), or make "
            "a module of the code around it, which will be kept whole"
        )


def expected_in_stages(reads: Sequence[fx.Node]) -> None:
    """Makes each read a node that stays in the graph, followed by one that compares."""
    for read in reads:
        value = read.meta.pop("read")
        read.meta["expects"] = value
        what = f"{what_is_read(read)} ({read.meta['text']} of {read.args[0]}) at {read.meta['source']}"
        with read.graph.inserting_after(read):
            node = read.graph.create_node("call_function", expect, (read, value, what), name=f"expect_{read.name}")
        inherited = ("source", "module", "state", "shapes")
        node.meta.update({key: read.meta[key] for key in inherited if key in read.meta}, random=False)


def what_is_read(read: fx.Node) -> str:
    return "a size" if "of_size" in read.meta else "the value of a tensor"


def expectations(traced: Traced) -> tuple[str, ...]:
    """What is compared in the stages, for people."""
    return tuple(f"{n.args[2]} is {n.args[1]!r}" for n in traced.graph.nodes if n.target is expect)
