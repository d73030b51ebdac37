"""A Llama of 70B parameters, planned on a laptop: no weights, no devices, no network.

    python examples/plan_70b.py                          eight H200
    python examples/plan_70b.py --hardware h100          does not fit: prints by how much, and what would
    python examples/plan_70b.py --layers 4 --devices 2   a small one, in seconds

The model is on the meta device: it has shapes and no values. Seconds are estimates for the hardware, memory is
counted. The script prints the plan, the simulated step, and the times of other schedules. `--save plan.json` saves the
plan: `fxpipe.pipeline(model, plan=fxpipe.Plan.load("plan.json"))` uses it for the model with weights.
"""

from __future__ import annotations

import argparse

import torch
from tabulate import tabulate
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe

SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "zero_bubble_2p")


def make_config(layers: int) -> LlamaConfig:
    """The sizes of Llama 3 70B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="a name of fxpipe.hardware.HARDWARE (default: h200)")
    parser.add_argument("--devices", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--layers", type=int, default=80, help="of the model (default: 80)")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a mini-batch (default: 64)")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence (default: 2048)")
    parser.add_argument("--chunks", type=int, default=32, help="micro-batches in a mini-batch (default: 32)")
    parser.add_argument("--save", help="a file for the plan")
    options = parser.parse_args()

    with torch.device("meta"):
        model = LlamaForCausalLM(make_config(options.layers)).to(torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} G parameters, none of which has a value\n")
    tokens = torch.zeros(options.batch, options.length, dtype=torch.int64)
    try:
        plan = fxpipe.plan(
            model,
            options.devices,
            example_kwargs={"input_ids": tokens},
            chunks=options.chunks,
            hardware=options.hardware,
        )
    except fxpipe.errors.MemoryLimitError as error:
        raise SystemExit(f"It does not fit.\n{error}") from None
    print(f"{plan}\n")

    rows = []
    for schedule in SCHEDULES:
        simulation = fxpipe.simulate(plan, schedule=schedule)
        bubble = simulation.as_step(has_memory=False).mean_bubble
        peak = max(memory.peak for memory in simulation.memory)
        rows.append((schedule, simulation.step_seconds, f"{100 * bubble:.1f} %", peak / 2**30))
    print("The same stages in other schedules, whether they fit or not:")
    print(tabulate(rows, headers=("schedule", "s for a step", "bubble", "GiB at most"), floatfmt=".2f"))
    if options.save:
        plan.save(options.save)
        print(f"saved: {options.save}")


if __name__ == "__main__":
    main()
