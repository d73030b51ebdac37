"""The command for clusters: nodes, devices in each, pipeline x data, and what crosses nodes."""

import json
from pathlib import Path

import pytest
from helpers.inspected import refusal

import fxpipe
from fxpipe.inspect.cli import main

MODEL = """
import torch
def deep():
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
"""
CLUSTER = ["--hardware", "h100", "--nodes", "2", "--devices-per-node", "2"]


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "models.py").write_text(MODEL)
    return [f"{tmp_path / 'models.py'}:deep", "--input", "32x64", "--chunks", "4", "--no-progress"]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_pipeline_and_data_are_chosen_and_the_plan_is_shown(argv, capsys):
    text = run([*argv, *CLUSTER], capsys)
    assert "pipeline x data" in text
    assert "mini-batches of 32 on 4 x cuda" in text
    assert "a step as simulated, 1f1b" in text
    assert "1f1b" in text
    assert "in 2 nodes of 2" in text
    assert "between nodes" in text
    assert max(map(len, text.split("a step as simulated")[1].partition("\n\n")[0].splitlines())) <= 120


def test_a_number_of_replicas_can_be_said(argv, capsys):
    text = run([*argv, *CLUSTER, "--data-parallel", "2", "--mesh", "pipe,data"], capsys)
    assert "2 stages, 4 micro-batches of at most 4 samples" in text
    assert "- runs on 2 replicas of a pipeline of 2 devices in 2 nodes of 2, mesh ('pipe', 'data')" in text
    assert "- reduces gradients in" in text
    assert "pipeline x data" not in text


def test_json_has_the_cluster_the_bytes_and_the_reduction(argv, capsys):
    document = json.loads(run([*argv, *CLUSTER, "--data-parallel", "2", "--json"], capsys))["simulation"]
    assert document["cluster"] == {
        "nodes": 2, "devices_per_node": 2, "pipe": 2, "data": 2, "mesh": ["data", "pipe"],
    }  # fmt: skip
    boundary, gradients = 4 * 64 * 4, 8 * (64 * 64 + 64) * 4
    assert document["traffic"] == {
        "within_nodes": {"pipeline": 2 * 4 * 2 * boundary, "reduction": 0},
        "between_nodes": {"pipeline": 0, "reduction": 2 * gradients},
    }
    assert [one["stage"] for one in document["reductions"]] == [0, 1]
    assert document["reduction_seconds"] == max(one["seconds"] for one in document["reductions"])
    assert 0 < document["exposed_reduction_seconds"] < document["step_seconds"]
    assert document["samples"] == 32
    tuned = json.loads(run([*argv, *CLUSTER, "--json"], capsys))["tuning"]
    assert {row["data_parallel"] for row in tuned} == {1, 2, 4}


def test_a_saved_plan_is_shown_with_replicas(argv, tmp_path, capsys):
    path = tmp_path / "plan.json"
    run([*argv, "--hardware", "h100", "--devices", "2", "--save", str(path)], capsys)
    text = run([str(path), *CLUSTER, "--data-parallel", "2"], capsys)
    assert "- runs on 2 replicas" in text
    assert "- runs on 2 replicas" in run([str(path), "--data-parallel", "2", "--hardware", "h100"], capsys)
    assert fxpipe.Plan.load(path).data_parallel == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hardware h100 --nodes 2 --devices-per-node 2 --devices 3", "--devices 3: --nodes 2 of 2 devices have 4"),
        ("--nodes 2", "--nodes without --hardware"),
        ("--devices-per-node 2", "--devices-per-node without --hardware"),
        ("--data-parallel 2", "--data-parallel without --hardware"),
        ("--hardware h100 --nodes 2 --sweep", "--sweep compares numbers of devices"),
        ("--hardware h100 --nodes 0", "expected a whole number"),
        ("--hardware h100 --nodes 2 --mesh data", "expected data,pipe or pipe,data"),
        ("--hardware h100 --nodes 2 --pin 0=0", "it cuts by itself"),
    ],
)
def test_what_does_not_go_together_is_one_line(argv, options, words, capsys):
    assert words in refusal([*argv, *options.split()], capsys)


SKIPPING = """
import torch
class Skipping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        first = self.l[0](x)
        return self.l[2](self.l[1](first)) + first
"""


def test_what_a_relay_costs_is_shown_for_processes(tmp_path, capsys):
    (tmp_path / "skips.py").write_text(SKIPPING)
    argv = [f"{tmp_path / 'skips.py'}:Skipping", "--input", "8x16", "--chunks", "2", "--no-progress", "--devices", "3"]
    argv += ["--hardware", "h100", "--balance", "l.0,l.1"]
    text = run([*argv, "--processes"], capsys)
    assert "between processes, for one micro-batch; to pack and to unpack a packet takes 0.200 ms more" in text
    assert "relayed" in text
    assert "between processes" not in run(argv, capsys)
    document = json.loads(run([*argv, "--processes", "--json"], capsys))
    assert document["processes"] is True
    packets = {(one["source"], one["target"]): one for one in document["packets"]}
    assert packets.keys() == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert packets[1, 2]["bytes"] == 2 * 256
    assert json.loads(run([*argv, "--json"], capsys))["processes"] is False
