"""W: the gradients of weights from what B has left on the tape.

Of a weight that is used once a gradient leaves as soon as it is there, so that only one of them lives beside the sums.
One that is used more often is summed over its uses first, from the last to the first: autograd runs its nodes in that
order, and the sum of a micro-batch goes into the sum of the step as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from fxpipe.rewriting.tape import Tape


def weighed(tape: Tape) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight's gradient, once. The tape is used up."""
    uses, gradients = tape.uses, tape.gradients
    if not gradients:  # nothing came back to this stage
        uses.clear()
    left = Counter(name for use, g in zip(uses, gradients, strict=True) if g is not None for name in use.names)
    parts: dict[str, torch.Tensor] = {}
    while uses:
        use, gradient = uses.pop(), gradients.pop()
        if gradient is None:
            continue
        for name, new in zip(use.names, use.weigh(gradient), strict=True):
            left[name] -= 1
            have = parts.pop(name, None)
            total = new if have is None else _sum(have, new)
            del have, new
            if left[name]:
                parts[name] = total
            else:
                yield name, total
            del total


def _sum(have: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new + have if have.is_sparse else have + new  # dense + sparse, the other way round torch has not
