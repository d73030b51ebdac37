"""What an action costs beside the operations of its stage.

Before F, R, B or W can compute, its worker waits at a fence, takes what was sent, and calls the stage's code or
autograd; after it, what was made is handed on and noted. That is Python on the host, as long for a small micro-batch as
for a large one: so it is what many small micro-batches cost, and what two stages cost that could be one.

On a GPU it costs nothing as long as the host is ahead of the device, and what is slower to launch than to run was
measured or reckoned as long as it takes to launch. So it counts on the CPU only.
"""

from __future__ import annotations

# Seconds of one action of a stage of one small operation, beyond that operation: `make bench`, tools/bench/overhead.py.
ON_CPU = 1e-4


def action_seconds(device: str) -> float:
    """Seconds that an action takes on a device beside the operations of its stage.

    >>> action_seconds("cuda:0")
    0.0
    """
    return ON_CPU if device.partition(":")[0] == "cpu" else 0.0
