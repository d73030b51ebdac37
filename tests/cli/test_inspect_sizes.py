"""`python -m fxpipe.inspect` with sizes that differ from batch to batch: `--dynamic` announces, `--sizes` asks."""

import json
from pathlib import Path

import pytest

from fxpipe.errors import ArgumentError
from fxpipe.inspect.cli import main
from fxpipe.inspect.cli_options import DynamicOption, parse_dynamic_option, parse_size_option

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
    def forward(self, ids):
        x = self.embed(ids)
        return self.last((self.first(x) @ x.transpose(1, 2)).softmax(-1) @ x)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "lengths.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return [
        "lengths.py:Model", "--input", "ids=4x16:int64", "--dynamic", "ids:1=s:2-64", "--devices", "2", "--chunks", "2",
        "--hardware", "cpu", "--no-progress",
    ]  # fmt: skip


def test_figures_are_those_of_the_sizes_that_are_asked_for(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--save", "plan.json", "--report", "report.html"]) == 0
    text = capsys.readouterr().out
    assert "micro-batches of at most 2 samples, s=16" in text
    assert "these stages at other sizes" in text
    assert "Other sizes" in Path("report.html").read_text()

    assert main(["plan.json", "--sizes", "s=64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (size,) = document["sizes"]
    assert (size["name"], size["size"], size["least"], size["most"], size["largest"]) == ("s", 64, 2, 64, 64)
    assert "b*s**2" in document["stages"][0]["memory_formula"] + document["stages"][1]["memory_formula"]
    assert [row["sizes"]["s"] for row in document["sizes_compared"]] == [32, 64]
    memory = max(stage["memory_bytes"] for stage in document["stages"])
    assert document["sizes_compared"][-1]["memory_bytes"] == memory

    assert main(["plan.json", "--json"]) == 0
    assert max(stage["memory_bytes"] for stage in json.loads(capsys.readouterr().out)["stages"]) < memory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "s=65"], "--sizes: s=65: the graph of the plan is one for sizes of 2 to 64"),
        (["--sizes", "s"], "'s': expected the name of a size and a whole number, as in s=512"),
        (["--dynamic", "ids=1"], "'ids=1': expected an input, a dimension and a name, as in ids:1=s"),
    ],
)
def test_what_cannot_be_is_one_line(
    command: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_are_read() -> None:
    assert parse_dynamic_option("ids:1=s") == DynamicOption("ids", 1, "s")
    assert parse_dynamic_option("batch['ids']:1=s:2-512") == DynamicOption("batch['ids']", 1, "s", 2, 512)
    assert parse_dynamic_option("x:2=height:-64") == DynamicOption("x", 2, "height", None, 64)
    assert parse_dynamic_option("x:2") == DynamicOption("x", 2)
    assert parse_dynamic_option("x:2=s:8-8") == DynamicOption("x", 2, "s", 8, 8)
    assert parse_size_option("s=512") == ("s", 512)
    with pytest.raises(ArgumentError, match="the least size, 9, is more than the largest, 8"):
        parse_dynamic_option("x:2=s:9-8")
