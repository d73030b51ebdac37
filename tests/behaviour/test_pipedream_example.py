"""The example of PipeDream, in a small size: it learns, and prints its loss beside that of synchronous training."""

import itertools
import sys

import pytest
from helpers.paths import ROOT, module_at


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_it_learns_as_synchronous_training_does(schedule, monkeypatch, capsys):
    path = ROOT / "examples" / "pipedream.py"
    example = module_at(path, "pipedream_example")
    monkeypatch.setattr(sys, "argv", [str(path), "--devices", "cpu,cpu", "--schedule", schedule, "--steps", "60"])
    example.main()
    printed = capsys.readouterr().out
    assert f"versions of the weights, by stage: [2, {1 if schedule == 'pipedream' else 2}]" in printed
    table = printed.split("on unseen text")[0].splitlines()
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    losses = [(float(streamed), float(synchronous)) for _, streamed, synchronous in rows]
    assert len(losses) == 3
    assert all(later[0] < earlier[0] for earlier, later in itertools.pairwise(losses))
    assert losses[-1][0] < losses[0][1]
    assert f"\n{schedule}: " in printed  # the record of its last mini-batches
