"""Model and inputs come to one device while they are traced, and the model goes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.tracing.model_state import (
    look_on_recording_device,
    model_on,
    move_inputs,
    recording_device,
    without_gradients,
)
from fxpipe.tracing.parameter_offload import OffloadedParameters
from fxpipe.utils import accelerator


def test_inputs_are_moved_and_still_require_grad_and_are_not_copied_where_they_are():
    x, nested = torch.randn(2, requires_grad=True), {"a": [torch.randn(2), None, 3]}
    same, same_nested = move_inputs((x, nested), torch.device("cpu"))
    assert same is x
    assert same_nested["a"][0] is nested["a"][0]
    (there,) = move_inputs((x,), torch.device("meta"))
    assert there.device.type == "meta"
    assert there.requires_grad
    assert there.is_leaf
    assert x.device.type == "cpu"


def test_weights_of_an_rnn_are_put_side_by_side_where_they_come_to(monkeypatch):
    """Each moves by itself. On a GPU cuDNN then gathered them at every call, and warned."""
    model, x, flattened = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)), torch.randn(4, 4, 4), []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: flattened.append(self))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)):
        assert model[1] in flattened


@pytest.mark.simulated
def test_gradients_are_set_aside_while_parameters_are_elsewhere(simulated):
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0](torch.randn(4, 2)).sum().backward()
    model[1](torch.tensor([1])).sum().backward()
    model[2].bias.grad = model[0].bias.grad  # two parameters, one gradient
    model.register_buffer("scale", torch.ones(2, requires_grad=True))
    model.scale.grad = torch.ones(2)
    held = [*model.parameters(), model.scale]
    gradients, data = [p.grad for p in held], [p.data_ptr() for p in held]
    with model_on(model, torch.device("sim:0")):
        assert all(p.grad is None and p.device.type == "sim" for p in held)
        with without_gradients(model):
            model[0](torch.randn(4, 2).to("sim:0")).sum().backward()
        assert all(p.grad is None for p in held)
    assert all(p.grad is gradient for p, gradient in zip(held, gradients, strict=True))
    assert [p.data_ptr() for p in held] == data


@pytest.mark.simulated
def test_gradients_come_back_where_the_block_raises(simulated):
    model = nn.Linear(2, 2)
    model(torch.randn(4, 2)).sum().backward()
    gradient = model.weight.grad
    with pytest.raises(RuntimeError), model_on(model, torch.device("sim:0")):
        model(torch.randn(4, 2))  # not on the device that the weights are on
    assert model.weight.grad is gradient


@pytest.mark.simulated
def test_tensors_that_share_memory_share_it_elsewhere(simulated):
    model = nn.Linear(3, 3)
    model.register_buffer("row", model.weight.detach()[1])
    with model_on(model, torch.device("sim:1")), torch.no_grad():
        model.weight.fill_(5)
        assert model.row.tolist() == [5, 5, 5]
    assert model.row.data_ptr() == model.weight[1].data_ptr()
    assert model.row.tolist() != [5, 5, 5]


@pytest.mark.simulated
def test_a_model_is_recorded_on_the_first_accelerator_of_its_stages(simulated):
    model = nn.Linear(4, 4)
    cpu, first, second = torch.device("cpu"), torch.device("sim:1"), torch.device("sim:2")
    assert recording_device(model, [cpu, first, second]) == first
    assert recording_device(model, [cpu, cpu]) == cpu
    assert recording_device(model.to("sim:3"), [cpu]) == torch.device("sim:3")
    assert recording_device(nn.ReLU(), [cpu]) is None
    assert recording_device(nn.Linear(2, 2, device="meta"), [first]) is None


@pytest.mark.simulated
def test_parameters_that_share_memory_share_it_while_they_are_offloaded(simulated):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    simulated.set_device_bytes(torch.sim.memory_allocated(0) + 20_000)
    x = torch.randn(2, 64)
    want = model(x)
    with model_on(model, torch.device("sim:0")):
        weights = [layer.weight.untyped_storage().data_ptr() for layer in model]
        assert weights[0] == weights[1] != 0
        torch.testing.assert_close(model(x.to("sim:0")).cpu(), want)


@pytest.mark.simulated
def test_an_offloaded_parameter_may_be_used_on_another_stream(simulated):
    model, device = nn.Linear(64, 64), torch.device("sim:0")
    simulated.set_device_bytes(torch.sim.memory_allocated(0) + 20_000)
    with model_on(model, device), torch.no_grad():
        weight, x = model.weight, torch.ones(2, 64, device=device)
        torch.sim.synchronize(0)
        with accelerator.current_streams(accelerator.new_stream(device)):
            out = x @ weight.t()
        torch.sim.synchronize(0)
        assert out.isfinite().all()


@pytest.mark.simulated
def test_where_memory_runs_out_it_is_recorded_on_the_cpu(simulated):
    model, seen = nn.Linear(2, 2), []

    def look(args, kwargs):
        seen.append((args[0].device.type, model.weight.device.type))
        if args[0].device.type == "sim":
            raise ValueError("no graph") from torch.OutOfMemoryError("out of memory")
        return "graph"

    device, result = look_on_recording_device(model, [torch.device("sim:0")], (torch.ones(1, 2),), {}, look)
    assert (device, result) == (torch.device("cpu"), "graph")
    assert seen == [("sim", "sim"), ("sim", "sim"), ("cpu", "cpu")]


@pytest.mark.simulated
def test_where_memory_runs_out_fewer_parameters_are_there_at_a_time(simulated):
    model, device = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.device("sim:0")
    simulated.set_device_bytes(1 << 20)
    seen = []

    def look(args, kwargs):
        model(args[0])
        seen.append(torch.sim.memory_allocated(0))
        if len(seen) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return "graph"

    assert look_on_recording_device(model, [device], (torch.ones(1, 64),), {}, look) == (device, "graph")
    assert seen[1] < seen[0]


@pytest.mark.simulated
def test_what_failed_on_the_device_is_told_where_the_cpu_fails_too(simulated):
    def look(args, kwargs):
        raise ValueError(args[0].device.type)

    with pytest.raises(ValueError, match="cpu") as raised:
        look_on_recording_device(nn.Linear(2, 2), [torch.device("sim:0")], (torch.ones(1, 2),), {}, look)
    assert raised.value.__notes__ == ["fxpipe: on sim:0, where that was tried first, it raised ValueError: sim"]


def test_a_thread_that_reads_a_parameter_while_the_fetching_of_others_ends_gets_it() -> None:
    model = nn.Linear(2, 2)
    with OffloadedParameters(torch.device("cpu"), room=0).following():
        read = nn.Module.__getattr__  # as another thread has looked it up, and is about to call it
    assert nn.Module.__getattr__ is not read
    assert read(model, "weight") is model._parameters["weight"]
