"""The benchmark for a GPU runs, here on the CPU: a table of toys."""

import argparse
import sys

import pytest
import torch
from helpers.paths import ROOT

BENCH = ROOT / "tools" / "bench"
OPTIONS = {
    "device": "cpu",
    "size": "toy",
    "batch": 4,
    "chunks": 2,
    "schedules": "1f1b,zero_bubble",
    "checkpoints": "never",
    "modes": "eager",
    "rounds": 1,
}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("models", "timing"):  # the tests have models of their own
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gpu

    yield gpu
    for name in ("gpu", "models", "timing"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_table_has_a_line_for_each_setting(gpu, name):
    found = gpu.train(name, argparse.Namespace(**OPTIONS))
    assert [str(one.setting) for one in found] == [
        "plain, eager",
        "1 stage, 1f1b, never, eager",
        "2 stages, 1f1b, never, eager",
        "2 stages, zero_bubble, never, eager",
    ]
    assert all(len(one.seconds) == 1 and one.peak is None for one in found)
    assert gpu.table(found).count("\n") == 1 + len(found)


def test_a_setting_with_another_loss_is_not_timed(gpu):
    options = argparse.Namespace(**OPTIONS)
    workload = gpu.WORKLOADS["gpt"](4, True)
    setting = gpu.Setting(0, "", "", False)
    with (
        gpu.trained(setting, workload, torch.device("cpu"), 1) as plain,
        pytest.raises(RuntimeError, match="plain, eager has loss"),
    ):
        gpu.measure(setting, workload, plain, 0.5, options)
