"""A row of the table: what one way made of one model, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

WAYS = ("fxpipe", "symbolic_trace", "pipelining")
AT_SIZES = "sizes"
IN_ONE = "chunks=1"
HANDED_OVER = "micro-batches"
MODES = ("train", "eval")

Task = tuple[str, str, int]  # way, mode, number of stages


@dataclass(frozen=True, slots=True)
class Row:
    """What one way made of one entry. Only fxpipe fills in what is below the message.

    "sizes", "chunks=1" and "micro-batches" are fxpipe as well, with a batch of each of several sizes, with one
    micro-batch, and with micro-batches that the caller hands over.
    """

    model: str
    family: str
    way: str
    mode: str  # "train" or "eval"
    stages: int
    verdict: str  # "right", "refused", "wrong outputs", "wrong gradients", "wrong buffers", "fails", "hangs", "crashes"
    message: str = ""
    tracer: str = ""
    remarks: str = ""  # what is special about the way
    nodes: int = 0
    largest_leaf: float = 0.0  # its share of the parameters
    plan_seconds: float = 0.0
    graphs: int = 0  # made for inputs of several sizes, where these may vary
    sizes: str = ""  # of these inputs
    called: Sequence[str] = ()  # functions of fxpipe, where calls are noted (`helpers.called_functions`)

    @property
    def is_wrong(self) -> bool:
        return self.verdict.startswith("wrong")
