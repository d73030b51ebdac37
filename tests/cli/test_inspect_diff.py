"""Two plans compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.inspected import MIB, make_plan, refusal

from fxpipe.inspect.cli import main
from fxpipe.inspect.diff import Change, MovedNodes, compare_plans, difference_text
from fxpipe.inspect.json_document import difference_document
from fxpipe.plans import Plan


def with_moved_nodes(plan: Plan) -> Plan:
    """The relu of stage 0 in stage 1, which takes 0.5 ms forward."""
    first, second, *others = plan.stages
    node = first.nodes[-1]
    first = replace(first, nodes=first.nodes[:-1], forward_seconds=first.forward_seconds - 5e-4)
    second = replace(second, nodes=(node, *second.nodes), forward_seconds=second.forward_seconds + 5e-4)
    return replace(plan, stages=(first, second, *others))


def test_a_plan_is_the_same_as_itself() -> None:
    found = compare_plans(make_plan(3), make_plan(3))
    assert found.is_empty
    assert difference_text(found, "a.json", "b.json") == "from a.json to b.json: the same plan"
    assert difference_document(found)["is_nothing"]


def test_nodes_that_moved_and_what_that_does() -> None:
    before = make_plan(3, 8)
    found = compare_plans(before, with_moved_nodes(before))
    assert not found.is_empty
    assert found.has_same_graph
    assert found.choices == ()
    assert found.moved == (MovedNodes(0, 1, ("layer0_relu",)),)
    assert [stage.stage for stage in found.stages if not all(f.is_same for f in stage.figures)] == [0, 1]
    assert Change("nodes", 2, 3) in found.stages[1].figures
    text = difference_text(found, "a.json", "models:make")
    assert text.startswith("from a.json to models:make\n\nmoved\n- 1 node from stage 0 to 1: layer0_relu\n")
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert lines["0"] == "0 1 (-1) 0.500 ms (-50.0 %) 2.00 ms 10.0 MiB 32.0 MiB 1.0 MiB"
    assert lines["1"] == "1 3 (+1) 2.50 ms (+25.0 %) 4.00 ms 10.0 MiB 30.0 MiB 1.0 MiB"
    assert lines["parameters"] == "parameters 30.0 MiB 30.0 MiB same"
    assert text.endswith("and 1 stage as before")


def test_choices_that_differ() -> None:
    other = replace(make_plan(2, 8, "gpipe", "always"), estimated_for="NVIDIA H200 SXM")
    found = compare_plans(make_plan(2), other)
    assert [change.name for change in found.choices] == ["schedule", "chunks", "estimated_for", "checkpoint"]
    text = difference_text(found, "a", "b")
    assert "schedule: 1f1b -> gpipe\nchunks: 4 -> 8\nseconds estimated for: measured here -> NVIDIA H200 SXM" in text
    assert "checkpoint: never -> always" in text
    assert "no node moved" in text


def test_other_numbers_of_stages_and_other_graphs() -> None:
    found = compare_plans(make_plan(2), replace(make_plan(3), fingerprint="other"))
    assert not found.has_same_graph
    assert found.new == ("layer2_linear", "layer2_relu")
    assert found.gone == ()
    assert all(figure.before is None for figure in found.stages[2].figures)
    text = difference_text(found, "a", "b")
    assert "the graphs differ (model, mode or inputs): nodes are compared by name" in text
    assert "stages: 2 -> 3\ndevices: cpu,cpu -> cpu,cpu,cpu" in text
    assert "- new: 2 nodes, layer2_linear ... layer2_relu" in text
    assert "2 (new)" in text
    back = difference_text(compare_plans(make_plan(3), make_plan(2)), "a", "b")
    assert "- (gone)" in back
    assert "- gone: 2 nodes" in back


def test_many_moves_stay_readable() -> None:
    before = make_plan(64)
    stages = [replace(s, nodes=before.stages[s.index ^ 1].nodes) for s in before.stages]
    text = difference_text(compare_plans(before, replace(before, stages=tuple(stages))), "a", "b")
    assert "- and 54 more such moves" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_command_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    plan = make_plan(3, 8)
    plan.save(before)
    with_moved_nodes(plan).save(after)
    assert main([str(after), "--diff", str(before)]) == 0
    assert capsys.readouterr().out.startswith(f"from {before} to {after}\n\nmoved\n")
    assert main([str(after), "--diff", str(before), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["difference"]["moved"] == [{"source": 0, "target": 1, "nodes": ["layer0_relu"]}]
    totals = {change["name"]: change for change in document["difference"]["totals"]}
    assert totals["parameter_bytes"] == {"name": "parameter_bytes", "before": 30 * MIB, "after": 30 * MIB}
    assert document["stages"][1]["nodes"][0] == "layer0_relu"  # the plan itself is there, too


def test_the_command_compares_with_what_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlp.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])\n"
    )
    path, argv = (
        tmp_path / "plan.json",
        [f"{tmp_path}/mlp.py:make", "--input", "8x8", "--devices", "2", "--chunks", "2"],
    )
    assert main([*argv, "--balance", "2,4", "--save", str(path)]) == 0
    assert capsys.readouterr().out.startswith("2 stages")
    assert main([*argv, "--balance", "4,2", "--diff", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "- 2 nodes from stage 1 to 0: " in printed


def test_a_plan_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    make_plan(2).save(path)
    line = refusal([str(path), "--diff", str(tmp_path / "no.json")], capsys)
    assert f"--diff {tmp_path}/no.json: cannot be read: No such file or directory" in line
    assert "--code prints the code of a stage and nothing else; leave --diff out" in refusal(
        [str(path), "--diff", str(path), "--code", "0"], capsys
    )
