"""Schedules and numbers of devices compared, and what does not fit."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers.drawn_steps import simulated
from helpers.inspected import MIB, make_plan, refusal
from helpers.paths import ROOT
from torch import nn

import fxpipe
from fxpipe.errors import MemoryLimitError, PartitionError
from fxpipe.hardware import HARDWARE, Hardware
from fxpipe.inspect import json_document as documents
from fxpipe.inspect.cli import main
from fxpipe.inspect.cli_options import cluster_hardware, first_devices, most_devices
from fxpipe.inspect.step_summary import (
    Outcome,
    compare_schedules,
    device_text,
    summaries_text,
    summarize_step,
    sweep_devices,
    sweep_text,
)
from fxpipe.planning.options.parse import TRAINING_SCHEDULES
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import Portal
from fxpipe.scheduling import SCHEDULES

SCHEDULES_HERE = ("1f1b", "gpipe", "zbv")


def test_schedules_on_the_stages_of_a_plan() -> None:
    plan = replace(plan_for(4, "1f1b"), chunks=8)
    runs = compare_schedules(plan)
    assert runs[0].schedule == "1f1b"
    names = {"1f1b", "gpipe", "zero_bubble", "zero_bubble_2p"}  # the others want two
    assert {run.schedule for run in runs} == names
    assert [run.step_seconds for run in runs[1:]] == sorted(run.step_seconds for run in runs[1:])
    by_name = {run.schedule: run for run in runs}
    assert by_name["gpipe"].peak_bytes > by_name["1f1b"].peak_bytes
    assert by_name["zero_bubble"].bubble < by_name["1f1b"].bubble
    assert len(compare_schedules(make_plan(1))) == 1  # one device: all are alike
    text = summaries_text(runs)
    assert text.startswith("these stages in other schedules, 8 micro-batches\n")
    assert "yes" not in text  # no limit is known


def test_the_device_that_is_closest_to_its_limit_is_told() -> None:
    plan, limits = make_plan(3, 8), (60 * MIB, 60 * MIB, 20 * MIB)
    stages = (replace(stage, memory_limit=limit) for stage, limit in zip(plan.stages, limits, strict=True))
    plan = replace(plan, stages=tuple(stages))
    simulation = fxpipe.simulate(plan)
    run = summarize_step(simulation, plan)
    peak = simulation.memory[2].peak
    assert (run.device, run.limit_bytes, run.over_bytes) == (2, 20 * MIB, round(peak) - 20 * MIB)
    outcome = Outcome("1f1b", 3, run)
    assert (outcome.over_bytes, outcome.fits) == (run.over_bytes, False)
    assert "does not fit: device 2 lacks" in str(plan)
    assert "of 20.0 MiB" in device_text(simulation)


def test_devices_of_a_sweep() -> None:
    assert most_devices(("cpu", "cpu"), 8, None) == 8
    assert most_devices(("cuda:0", "cuda:1"), 8, None) == 2  # there are no more here, or none are to be used
    assert most_devices(("cuda:0", "cuda:1"), 8, "h100") == 8
    assert most_devices(("cpu",) * 16, 8, None) == 16
    assert first_devices(("cuda:1", "cuda:0"), 1, None) == ("cuda:1",)
    assert first_devices(("cpu", "cpu"), 3, None) == ("cpu",) * 3
    assert first_devices(("cuda:0",), 2, "h100") == ("cuda:0", "cuda:1")
    nodes_of_two = cluster_hardware("v100", 2, 2, None)  # with four adapters in a node of eight
    assert isinstance(nodes_of_two, Hardware)
    assert (nodes_of_two.devices, nodes_of_two.adapters_per_node) == (4, 2)


def test_of_many_devices_those_are_shown_that_hold_most() -> None:
    text = device_text(simulated("1f1b", 20, 20))  # the first stages keep most micro-batches
    shown = [line.split()[0] for line in text.splitlines()[2:] if line and line.split()[0].isdecimal()]
    assert shown == [str(d) for d in range(16)]
    assert text.endswith("and 4 devices that hold less")


def plan_for(devices: int, schedule: str) -> Plan:
    """Of work for 12 ms, shared out evenly."""
    recipe = SCHEDULES[schedule]
    stages = devices * recipe.stages_per_device
    plan = make_plan(stages, 16, schedule)
    seconds = {"forward_seconds": 4e-3 / stages, "backward_seconds": 8e-3 / stages, "weight_seconds": 4e-3 / stages}
    even = tuple(replace(stage, **seconds) for stage in plan.stages)
    return replace(plan, stages=even, placement=recipe.placement(devices, recipe.stages_per_device))


def test_a_sweep_has_a_row_for_each_number_and_schedule() -> None:
    rows = sweep_devices((1, 2, 4), SCHEDULES_HERE, plan_for)
    assert [(row.devices, row.schedule) for row in rows] == [(1, "1f1b")] + [
        (count, name) for count in (2, 4) for name in SCHEDULES_HERE
    ]
    # Of n equal stages and m micro-batches a step takes (m + n - 1) / m of an even share.
    assert [row.speedup for row in rows if row.schedule == "1f1b"] == pytest.approx([1, 2 * 16 / 17, 4 * 16 / 19])
    text = sweep_text(rows)
    marked = [line.split() for line in text.splitlines() if " * " in line]
    assert "as if each had a core" not in sweep_text(rows[:1])
    many = {"devices": ("cpu",) * 4096, "placement": tuple(range(4096))}
    crowded = [replace(row, plan=replace(row.plan, **many)) for row in rows if row.plan]
    assert "CPU devices are simulated as if each had a core; there " in sweep_text(crowded)
    assert [line[0] for line in marked] == ["1", "zbv", "zbv"]  # a number stands in the first row of each


def test_what_does_not_fit_and_what_cannot_be_cut_are_rows() -> None:
    def hard(devices: int, schedule: str) -> Plan:
        if devices == 1:
            raise MemoryLimitError("a table", "no cut fits", 3 * 2**30)
        if devices == 4:
            raise PartitionError("only 3 nodes")
        return plan_for(devices, schedule)

    rows = sweep_devices((1, 2, 4), ("1f1b",), hard)
    assert [row.fits for row in rows] == [False, True, False]
    assert all(row.speedup is None for row in rows)
    text = sweep_text(rows)
    assert "over by 3.0 GiB" in text
    assert text.endswith("no plan for\n- 4 devices, 1f1b: only 3 nodes")
    assert "nothing fits" in sweep_text(rows[:1])


MLP = "from torch import nn\ndef make(n=6): return nn.Sequential(*[nn.Linear(64, 64) for _ in range(n)])\n"


@pytest.fixture
def mlp(tmp_path: Path) -> list[str]:
    (tmp_path / "mlp.py").write_text(MLP)
    return [f"{tmp_path}/mlp.py:make", "--input", "16x64", "--hardware", "h100"]


def test_the_command_sweeps(mlp: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*mlp, "--sweep"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("numbers of devices and schedules")
    assert [line.split()[0] for line in printed.splitlines() if re.match(r" +\d", line)] == ["1", "2", "4", "8"]
    words = " ".join(printed.split())
    names = [name for name in TRAINING_SCHEDULES if SCHEDULES[name].stages_per_device == 2]
    assert f"no plan for - 4 devices, {', '.join(names)}: stages=8, but the 6 nodes can be cut into 6 at" in words
    assert "- 8 devices, 1f1b, gpipe, zero_bubble, zero_bubble_2p: stages=8, but the 6" in words
    assert main([*mlp, "--sweep", "--json", "--devices", "2", "--schedule", "gpipe"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schedule"] == "gpipe"
    assert document["sweep"][0]["speedup"] == 1
    assert {row["devices"] for row in document["sweep"]} == {1, 2}  # no more than were asked for
    assert document["sweep"][1]["run"]["schedule"] == document["sweep"][1]["schedule"] == "gpipe"


def test_chunks_are_chosen_as_in_python_and_for_each_row(mlp: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a number of micro-batches each row has the number that `fxpipe.plan` would choose."""
    argv = [mlp[0], "--input", "1048576x64", "--meta", "--hardware", "h100", "--devices", "2", "--sweep", "--json"]
    documents = []
    for chunks in ([], ["--chunks", "auto"]):
        assert main([*argv, *chunks]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0]["sweep"] == documents[1]["sweep"]
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.empty(2**20, 64)
    assert len({row["run"]["micro_batches"] for row in documents[0]["sweep"] if row["run"]}) > 1
    names = ("1f1b", "gpipe", "zbv")
    for row in (row for row in documents[0]["sweep"] if row["devices"] == 2 and row["schedule"] in names):
        plan = fxpipe.plan(model, devices=2, example_args=(x,), hardware="h100", schedule=row["schedule"])
        assert row["run"]["micro_batches"] == plan.micro_batches
        assert row["run"]["step_seconds"] == pytest.approx(fxpipe.simulate(plan).step_seconds)


def test_the_command_tunes(mlp: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*mlp, "--devices", "2", "--tune"]
    assert main([*argv, "--save", f"{tmp_path}/best.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mini-batches of 16 on 2 x cuda, seconds estimated for NVIDIA H100 SXM")
    marked = next(line.split() for line in printed.splitlines() if line.startswith("->"))
    best = Plan.load(tmp_path / "best.json")
    assert [best.schedule, str(best.chunks)] == marked[1:3]
    assert main([*argv, "--schedule", "gpipe", "--chunks", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {(row["schedule"], row["chunks"]) for row in document["tuning"]} == {("gpipe", 4)}
    assert (document["schedule"], document["chunks"]) == ("gpipe", 4)
    assert "--tune and --pin: it cuts by itself" in refusal([*argv, "--pin", "0=0"], capsys)
    assert "--tune and --balance 2,4: it cuts by itself" in refusal([*argv, "--balance", "2,4"], capsys)
    assert main([f"{tmp_path}/best.json", "--tune"]) == 0
    assert "->" in capsys.readouterr().out
    assert "--sweep and --tune are two questions" in refusal([*argv, "--sweep"], capsys)


def test_the_document_has_the_documented_keys(
    mlp: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*mlp, "--devices", "2", "--chunks", "4", "--json"]
    assert main([*argv, "--sweep"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main([*argv, "--tune"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    described = {*re.findall(r"\w+", (ROOT / "docs/inspect.md").read_text(encoding="utf-8"))}
    simulation = document["simulation"]
    parts = [document, simulation, simulation["devices"][0], simulation["devices"][0]["peak"], simulation["sent"][0]]
    parts += [document["schedules"][0], document["sweep"][0], document["sweep"][0]["run"], tuned, tuned["tuning"][0]]
    plan = documents.plan_document(make_plan(2, portals=(Portal("skip", 0, 1, 5),)))
    assert plan["portals"] == [{"name": "skip", "source": 0, "target": 1, "bytes": 5, "formula": "", "line": ""}]
    parts += [plan, plan["stages"][0], plan["portals"][0], plan["totals"]]
    for part in parts:
        assert part.keys() <= described, part.keys() - described
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_hardware_is_a_name_in_any_case_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlp.py").write_text(MLP)
    argv = [f"{tmp_path}/mlp.py:make", "--input", "16x64", "--devices", "2", "--json", "--hardware"]
    figures = asdict(HARDWARE["h100"])
    (tmp_path / "own.json").write_text(json.dumps(figures))
    documents = []
    for hardware in ("h100", "H100", f"{tmp_path}/own.json"):
        assert main([*argv, hardware]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1] == documents[2]
    assert main([*argv[:-1], "--hardware", f"{tmp_path}/own.json", "--nodes", "1", "--devices-per-node", "2"]) == 0
    capsys.readouterr()
    assert "did you mean h100" in refusal([*argv, "h1000"], capsys)
    assert "none.json" in refusal([*argv, "none.json"], capsys)


def test_the_least_limit_is_told_and_is_enough(mlp: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*mlp, "--devices", "2", "--memory-limit"]
    line = refusal([*argv, "60KiB"], capsys)
    assert "no cut into 2 stages fits into memory; the best one is over by" in line
    least = re.search(r"The least limit that would do: --memory-limit (\S+?)\.$", line)
    assert least is not None, line
    assert main([*argv, least[1]]) == 0
    capsys.readouterr()
