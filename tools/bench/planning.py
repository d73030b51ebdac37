"""How long planning takes and how much memory: deep models with values, and a Llama of 70 G parameters without.

    python tools/bench/planning.py
    python tools/bench/planning.py --cases "llama 70B, meta" --json planning.json

Each case runs in a child process of its own, so that its peak of memory is its own: once pass by pass, once by
`fxpipe.plan`. What came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

DEVICES, CHUNKS = 8, 4


@dataclass(frozen=True)
class Case:
    """A model and a mini-batch for it."""

    make: Callable[[], tuple[Any, Any]]
    what: str


def make_blocks(count: int) -> tuple[Any, Any]:
    """So many blocks of four functions each, tiny and with values."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    return nn.Sequential(*(Block() for _ in range(count))), torch.randn(16, 16)


def make_llama() -> tuple[Any, Any]:
    """The sizes of Llama 3 70B; 8 sequences of 4096 tokens. Nothing of it takes memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16), torch.zeros(8, 4096, dtype=torch.long)


CASES = {
    "400 blocks": Case(lambda: make_blocks(400), "1,600 nodes, values, measured"),
    "2500 blocks": Case(lambda: make_blocks(2500), "10,000 nodes, values, measured"),
    "llama 70B, meta": Case(make_llama, "no values, estimated for an A100"),
}
COLUMNS = ("nodes", "imports", "trace", "profile", "cut", "whole plan", "whole, CPU", "MiB before", "MiB at most")


# -- in a child process ------------------------------------------------------------------------------------------------


def mebibytes() -> float:
    """The peak so far."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found / 2**20 if sys.platform == "darwin" else found / 2**10


def run_passes(case: Case) -> dict[str, float]:
    """Seconds of the passes, each called by itself."""
    start = time.perf_counter()
    model, x = case.make()
    import fxpipe
    from fxpipe.partitioning import block_partition

    found = {"imports": time.perf_counter() - start}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        found[name] = time.perf_counter() - start
        return result

    traced = timed("trace", lambda: fxpipe.trace(model, (x,), chunks=CHUNKS))
    size = len(x) // CHUNKS
    costs = timed("profile", lambda: fxpipe.profile(traced, (x,), micro_batch=size))
    timed("cut", lambda: block_partition(costs.seconds, DEVICES))
    return found | {"nodes": len(traced.nodes)}


def run_plan(case: Case) -> dict[str, float]:
    """Seconds and memory of a whole plan."""
    model, x = case.make()
    import fxpipe

    before = mebibytes()
    start, start_on_cpu = time.perf_counter(), time.process_time()
    fxpipe.plan(model, DEVICES, example_args=(x,), chunks=CHUNKS)
    return {
        "whole plan": time.perf_counter() - start,
        "whole, CPU": time.process_time() - start_on_cpu,
        "MiB before": before,
        "MiB at most": mebibytes(),
    }


# -- in the parent -----------------------------------------------------------------------------------------------------


def run_child(name: str, part: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, part]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "PART"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, part = options.child
        print(json.dumps({"passes": run_passes, "plan": run_plan}[part](CASES[name])))
        return
    found = {}
    for name in tqdm(options.cases, disable=None):
        found[name] = run_child(name, "passes") | run_child(name, "plan")
    rows = [
        [name, CASES[name].what, *(f"{figures[c]:,.0f}" if c[0] in "nM" else f"{figures[c]:.1f}" for c in COLUMNS)]
        for name, figures in found.items()
    ]
    print(tabulate(rows, headers=["model", "", *COLUMNS], disable_numparse=True, colalign=["left"] * 2 + ["right"] * 9))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
