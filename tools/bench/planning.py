"""How long planning takes and how much memory: deep models with values, and a Llama of 70 G parameters without.

    python tools/bench/planning.py
    python tools/bench/planning.py --cases "llama 70B, meta" --json planning.json

Each case runs in a child process of its own, so that its peak of memory is its own: once pass by pass, once by
`fxpipe.plan`. Smaller models are planned several times, beside a plain step and `torch.export` of the same model; the
table has medians of CPU seconds of one thread and their ratio. What came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

DEVICES, CHUNKS = 8, 4
REPEATED, STAGES = 5, 2  # of smaller models: runs after one that warms up, and stages


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


def make_mlp() -> tuple[Any, Any]:
    import torch
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(
        8, 64
    )


def make_encoder() -> tuple[Any, Any]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 16, 64)


def make_bert() -> tuple[Any, Any]:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return BertModel(config), torch.randint(0, 1000, (8, 32))


def make_gpt2() -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), torch.randint(0, 50257, (8, 128))


SMALLER = {
    "MLP": Case(make_mlp, "three layers, 8 x 64"),
    "encoder": Case(make_encoder, "four layers of torch's, 8 x 16 x 64"),
    "tiny BERT": Case(make_bert, "two layers, 8 x 32"),
    "GPT-2 small": Case(make_gpt2, "8 x 128"),
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


def run_beside_export(case: Case) -> dict[str, float]:
    """CPU seconds of a plan, a plain step and an export; each is repeated in turn with the others."""
    import torch
    from torch.utils import _pytree as pytree

    torch.set_num_threads(1)
    model, x = case.make()
    import fxpipe

    def step() -> None:
        leaves = [t for t in pytree.tree_leaves(model(x)) if isinstance(t, torch.Tensor)]
        sum(t.float().square().mean() for t in leaves).backward()
        model.zero_grad()

    ways: dict[str, Callable[[], Any]] = {
        "plan": lambda: fxpipe.plan(model, STAGES, example_args=(x,), chunks=CHUNKS),
        "step": step,
        "export": lambda: torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b")},)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATED + 1):
        for name, run in ways.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(runs[1:]) for name, runs in seconds.items()}
    return medians | {"ratio": medians["plan"] / (medians["step"] + medians["export"])}


# -- in the parent -----------------------------------------------------------------------------------------------------


def run_child(name: str, part: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, part]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show_passes(names: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {name: run_child(name, "passes") | run_child(name, "plan") for name in tqdm(names, disable=None)}
    rows = [
        [name, CASES[name].what, *(f"{figures[c]:,.0f}" if c[0] in "nM" else f"{figures[c]:.1f}" for c in COLUMNS)]
        for name, figures in found.items()
    ]
    print(tabulate(rows, headers=["model", "", *COLUMNS], disable_numparse=True, colalign=["left"] * 2 + ["right"] * 9))
    return found


def show_beside_export(names: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {name: run_child(name, "beside export") for name in tqdm(names, disable=None)}
    rows = [[name, SMALLER[name].what, *(f"{one:.3g}" for one in figures.values())] for name, figures in found.items()]
    print(tabulate(rows, headers=["model", "", "plan, CPU s", "step", "export", "plan / (step + export)"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SMALLER], default=[*CASES, *SMALLER])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "PART"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, part = options.child
        parts = {"passes": run_passes, "plan": run_plan, "beside export": run_beside_export}
        print(json.dumps(parts[part]((CASES | SMALLER)[name])))
        return
    found = {}
    for show, cases in ((show_beside_export, SMALLER), (show_passes, CASES)):
        if names := [name for name in options.cases if name in cases]:
            found |= show(names)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
