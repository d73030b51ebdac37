"""A checkpoint is read onto the devices of the stages: the host holds no whole model."""

import pytest
import torch
from torch import nn

import fxpipe

pytest.importorskip("safetensors")
from safetensors.torch import save_file

pytestmark = pytest.mark.simulated


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def test_each_stage_reads_its_weights_onto_its_device(simulated, tmp_path):
    plain, x = layers(), torch.randn(8, 64)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = layers()
    devices = ["sim:0", "sim:1"]
    with fxpipe.pipeline(model, devices, 4, example_args=(x,), balance=["1"], progress=False) as pipe:
        fxpipe.distributed.load(pipe, tmp_path)
        assert [str(block[0].weight.device) for block in model] == ["sim:0", "sim:0", "sim:1", "sim:1"]
        loss = pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
        want = plain(x).square().mean()
        want.backward()
        torch.testing.assert_close(loss.cpu(), want.detach())
        for (name, have), value in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad.cpu(), value.grad, msg=lambda text, name=name: f"{name}: {text}")
