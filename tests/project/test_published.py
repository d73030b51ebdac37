"""The published experiments: each has the paper's figures beside its own, and what they switch off is off."""

import importlib
import sys
from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch
from helpers.paths import ROOT

BENCH = ROOT / "tools" / "bench"
NAMES = sorted(path.stem for path in (BENCH / "published").glob("*.py") if "def tables(" in path.read_text())


@pytest.fixture
def load(monkeypatch):
    """Imports a script as it is when it runs: its folder and that of all benchmarks are where modules are sought."""
    monkeypatch.setattr(sys, "path", [str(BENCH / "published"), str(BENCH), *sys.path])
    return importlib.import_module


class ModelOnly:
    """In place of a training step: the small model runs once, without a pipeline."""

    planned_bytes = 1.0

    def __init__(self, *arguments):
        (workload,) = [one for one in arguments if hasattr(one, "model")]
        with torch.no_grad():
            assert workload.loss_fn(workload.model(workload.inputs), workload.target).isfinite()


def check_table(table, tables, folder):
    assert table.rows, table.title
    assert len({tuple(row) for row in table.rows}) == 1, "rows of one table have the same columns"
    published = [row[name] for row in table.rows for name in row if name.startswith("published")]
    assert any(cell is not None for cell in published), f"{table.title} has no figures of the paper"
    assert tables.Table.from_json(table.as_json()).markdown() == table.markdown()
    if table.plot is not None:
        assert {*table.plot.columns, *table.plot.label.split(",")} <= {*table.rows[0]}
        tables.draw(table, folder / "plot.svg")


def test_every_experiment_is_one_of_the_results(load):
    assert sorted(load("results").PUBLISHED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_small_models_run_and_the_papers_figures_stand_beside(load, monkeypatch, tmp_path, name):
    script, experiment, tables = load(name), load("experiment"), load("tables")
    figures = experiment.StepFigures(1.0, (0.5,), (2.0**30,))
    stand_ins = {
        "TrainingStep": ModelOnly,
        "measure": lambda steps, *_: {key: figures if make and make() else None for key, make in steps.items()},
        "plan_for": lambda *_, **__: None,
        "simulate": lambda *_, **__: figures,
        "without_portals": lambda plan: plan,
        "SwitchedStep": ModelOnly,
        "simulated_gib": lambda *_: 1.0,
        "parameters_of": lambda _: 1,
        "simulated_seconds": lambda profile: dict.fromkeys(profile.rates, 2 * profile.work),
        "measured_rates": lambda workload, *_: ModelOnly(workload) and (2.0, 1.0),
    }
    for attribute, stand_in in stand_ins.items():
        if hasattr(script, attribute):
            monkeypatch.setattr(script, attribute, stand_in)
    if name == "pipedream_flush":
        monkeypatch.setattr(script, "simulated", lambda *_: 0.5)
    if name == "tutorial_resnet50":
        sweep = SimpleNamespace(table=[(2, 1.0, 1.0, 1.0)], lines={"a single device": 1.0}, chosen=2)
        example = SimpleNamespace(run_sweep=lambda *_: sweep, make_model=None)
        monkeypatch.setattr(script, "load_script", lambda _: example)
    setting = experiment.Setting(("cpu", "cpu"), is_small=True, rounds=1)
    titles = []
    for table in script.tables(setting):
        check_table(table, tables, tmp_path)
        titles.append(table.title)
    assert any("measured here" in title for title in titles)
    assert any("simulated" in title for title in titles)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_small_settings_run(load, tmp_path, name):
    script, experiment, tables = load(name), load("experiment"), load("tables")
    setting = experiment.Setting(("cpu", "cpu"), is_small=True, rounds=1)
    for table in takewhile(lambda one: "measured here" in one.title, script.tables(setting)):
        check_table(table, tables, tmp_path)


# -- the switches of the ablation ------------------------------------------------------------------------------------


def skipping_step(ablation, experiment, portals=True):
    """A training step of a small U-Net over four stages, two of which a skip goes past."""
    torch.manual_seed(0)
    images, mask = torch.rand(4, 3, 16, 16), torch.ones(4, 1, 16, 16)
    loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
    workload = experiment.Workload(ablation.UNet(1, 4, 3).eval(), images, mask, loss_fn)  # eval: no dropout
    switches = ablation.Switches("", True, True, portals, throughput=0.0, utilisation=0.0, gib=0.0)
    return ablation.SwitchedStep(switches, workload, ["cpu"] * 4, 2, balance=["down.1", "bottom", "up.0"])


def test_without_portals_a_plan_sends_to_neighbours_only(load):
    ablation, experiment = load("unet_ablation"), load("experiment")
    step = skipping_step(ablation, experiment)
    plan = step.pipe.plan
    step.close()
    relayed = ablation.without_portals(plan)
    assert {abs(way.source - way.target) for way in relayed.sendings} == {1}
    assert sum(way.bytes for way in relayed.sendings) == sum(
        way.bytes * abs(way.source - way.target) for way in plan.sendings
    )
    between = [j for j in range(4) if any(one.source < j < one.target for one in plan.portals)]
    for j in between:
        assert relayed.memory(j, b=2) > plan.memory(j, b=2)


def test_without_fences_all_is_recomputed_before_the_first_backward(load):
    ablation = load("unet_ablation")
    from fxpipe.scheduling import ActionKind, make_schedule

    schedule = make_schedule(ablation.recompute_all_first, 4, 8, "except_last")
    for row in schedule.rows:
        kinds = [action.kind for action in row]
        assert kinds == [ActionKind.FORWARD] * 8 + [ActionKind.RECOMPUTE] * 7 + [ActionKind.BACKWARD] * 8


def test_without_copy_streams_copies_are_on_the_streams_that_compute(load, monkeypatch):
    ablation = load("unet_ablation")
    from fxpipe.runtime import transport

    off, on = (
        ablation.Switches("", True, streams, True, throughput=0.0, utilisation=0.0, gib=0.0)
        for streams in (False, True)
    )
    with ablation.in_effect(on):
        assert transport.copy_streams is not ablation.compute_streams
    monkeypatch.setattr(ablation.accelerator, "current_stream", lambda device: f"compute {device}")
    source, target = torch.device("cuda:0"), torch.device("cuda:1")
    with ablation.in_effect(off):
        assert transport.copy_streams(source, target) == ("compute cuda:0", "compute cuda:1")
        assert transport.copy_streams(torch.device("cpu"), target) == ("compute cuda:1",)
