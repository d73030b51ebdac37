"""The switches of the ablation on simulated devices: with any of them off a step is right, and nothing is unordered."""

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.paths import ROOT

pytestmark = pytest.mark.simulated
DEVICES = [f"sim:{k}" for k in range(4)]


@pytest.fixture
def ablation(monkeypatch):
    folders = [str(ROOT / "tools" / "bench" / "published"), str(ROOT / "tools" / "bench")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    return importlib.import_module("unet_ablation")


def test_a_step_is_right_with_each_mechanism_off_and_relays_copy_more(ablation, simulated):
    experiment = importlib.import_module("experiment")
    torch.manual_seed(0)
    model = ablation.UNet(1, 4, 3).eval()  # eval: no dropout
    images, mask = torch.rand(4, 3, 16, 16), torch.ones(4, 1, 16, 16)
    plain = copy.deepcopy(model)
    F.binary_cross_entropy_with_logits(plain(images), mask).backward()
    copies = {}
    for switches in ablation.ROWS:
        workload = experiment.Workload(model, images, mask, F.binary_cross_entropy_with_logits)
        step = ablation.SwitchedStep(switches, workload, DEVICES, 2, balance=["down.1", "bottom", "up.0"])
        simulated.begin()
        step()
        copies[switches.name] = simulated.count("copies between devices")
        step.close()
        for (name, have), want in zip(step.model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad.cpu(), want.grad, msg=name)
    assert copies["none"] == copies["fences"] == copies["fences, copy streams"]
    assert copies["fences, copy streams"] > copies["fences, copy streams, portals"]
