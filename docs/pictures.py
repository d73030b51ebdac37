"""Pictures for the documentation, drawn by fxpipe itself from plans for hardware that need not be here.

    python docs/pictures.py folder

mkdocs calls `on_files` while it builds the pages: the pictures are files of the site that stand nowhere else, and so
show what the code draws today.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.inspect.gantt import draw_gantt
from fxpipe.inspect.stage_graph import draw_stage_graph
from fxpipe.inspect.svg import svg_of
from fxpipe.scheduling import SCHEDULES, STREAM_POLICIES

DEVICES, CHUNKS = 4, 8
WIDTH, SAMPLES = 8192, 2048


class UNet(nn.Module):
    """Convolutions on three depths, with a skip on each of the first two."""

    def __init__(self, channels: int = 64):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)])
        self.bottom = nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4)))
        self.up = nn.ModuleList(nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
        x = self.bottom(x)
        for layer in self.up:
            x = F.relu(layer(torch.cat([x, skips.pop()], dim=1)))
        return self.head(x)


def layers_of_equal_time() -> tuple[nn.Module, Tensor]:
    """A model whose every layer takes as long for the gradient of its input, and of its weight, as for forward."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4 * DEVICES)))
        return model, torch.zeros(CHUNKS * SAMPLES, WIDTH, requires_grad=True)


def pictures() -> Iterator[tuple[str, str]]:
    """Yields names of files and their content."""
    with torch.device("meta"):
        unet, images = UNet(), torch.zeros(64, 3, 256, 256)
    plan = fxpipe.plan(unet, DEVICES, example_args=(images,), chunks=CHUNKS, hardware="h100", progress=False)
    yield "graph.svg", svg_of(draw_stage_graph(plan, "A U-Net in four stages: two skips become portals"))
    model, x = layers_of_equal_time()
    devices = [f"cuda:{k}" for k in range(DEVICES)]
    for schedule in SCHEDULES.keys() - STREAM_POLICIES.keys() - {"inference"}:
        plan = fxpipe.plan(
            model,
            devices=devices,
            example_args=(x,),
            chunks=CHUNKS,
            schedule=schedule,
            hardware="h100",
            balance="block",
            checkpoint="never",
            progress=False,
        )
        simulation = fxpipe.simulate(plan)
        step = replace(simulation.as_step(), memory=())
        yield f"{schedule}.svg", svg_of(draw_gantt(step, title=schedule))
        if schedule == "1f1b":
            yield "memory.svg", svg_of(draw_gantt(simulation.as_step(), title="1f1b, with its memory"))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures to the files of the site."""
    from mkdocs.structure.files import File

    for name, content in pictures():
        files.append(File.generated(config, f"pictures/{name}", content=content))
    return files


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, content in pictures():
        folder.joinpath(name).write_text(content, encoding="utf-8")
