"""The sweep of split sizes in `examples/`: its own parts, and all of it on a model with few channels."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.paths import ROOT
from torch import nn


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "examples" / "tutorial_split_size.py"
    spec = importlib.util.spec_from_file_location("tutorial_split_size", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses ask there
    spec.loader.exec_module(module)
    return module


def small(sweep: ModuleType) -> type[nn.Module]:
    class Small(sweep.ResNet50):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.stem = nn.Conv2d(3, 8, 3)
            self.layer1 = sweep.layer(8, 4, 1, stride=1)
            self.layer2 = sweep.layer(16, 4, 1, stride=1)
            self.layer3 = sweep.layer(16, 4, 1, stride=1)
            self.layer4 = sweep.layer(16, 4, 1, stride=1)
            self.head = nn.Linear(16, sweep.CLASSES)

    return Small


def test_it_is_resnet_50(sweep: ModuleType) -> None:
    with torch.device("meta"):
        model = sweep.make_model()
    without_head = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.head.parameters())
    assert without_head == 25_557_032 - 2_049_000  # of the published model, and of its head for 1,000 classes
    assert model(torch.zeros(2, 3, 64, 64, device="meta")).shape == (2, sweep.CLASSES)


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_by_hand_computes_what_the_model_does(sweep: ModuleType, split: int) -> None:
    model = small(sweep)().eval()
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(sweep.ByHand(model, ["cpu", "cpu"], split)(x), model(x))


def test_the_whole_sweep(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    path = tmp_path / "sweep.png"
    given = ["--devices", "cpu,cpu", "--batch", "8", "--image", "8", "--splits", "2,4", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["tutorial_split_size.py", *given, "--output", str(path)])
    monkeypatch.setattr(sweep, "ResNet50", small(sweep))
    sweep.main()
    shown = capsys.readouterr().out
    assert sweep.split_sizes(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert "chosen by fxpipe.tune before any was run" in shown
    assert f"plot: {path}" in shown
    assert path.read_bytes().startswith(b"\x89PNG")
