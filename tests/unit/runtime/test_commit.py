"""How gradients leave a step. Tensors of the meta device stand for those of a GPU, of which autograd asks no stream."""

import contextvars
import threading

import pytest
import torch
from torch import nn

from fxpipe.errors import StateError
from fxpipe.runtime.commit import add_gradient, attach_commit

META, CPU = torch.device("meta"), torch.device("cpu")
CASES = {
    "all on the CPU": (CPU, (CPU, CPU)),
    "all elsewhere": (META, (META, META)),
    "outputs elsewhere": (META, (CPU, CPU)),
    "inputs elsewhere": (CPU, (META, CPU, META)),
}


def _parameters(devices):
    return [nn.Parameter(torch.ones(k + 1, device=device)) for k, device in enumerate(devices)]


def _step(devices, output_device, gradients):
    """Parameters, an output, and what the backward was called with, and where."""
    inputs, called = _parameters(devices), []

    def finish(given):
        called.append((given, threading.get_ident(), contextvars.copy_context()))
        return [*gradients]

    (output,) = attach_commit(finish, [torch.zeros(2, device=output_device)], inputs)
    return inputs, output, called


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_the_inputs(case):
    output_device, devices = CASES[case]
    gradients = [torch.full((k + 1,), k + 2.0, device=device) for k, device in enumerate(devices)]
    gradients[-1] = None
    inputs, output, called = _step(devices, output_device, gradients)
    given = torch.ones(2, device=output_device)
    output.backward(given)
    (((found,), thread, _),) = called
    assert found.device == output_device
    assert found.shape == (2,)
    assert thread == threading.get_ident()
    assert inputs[-1].grad is None
    for parameter, gradient in zip(inputs[:-1], gradients, strict=False):
        assert parameter.grad.device == parameter.device
        assert parameter.device == META or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("case", CASES)
def test_each_gradient_comes_from_a_node_of_its_device_and_none_of_a_gpu_waits(case):
    """Else autograd takes the stream of the outputs for that of all gradients, and blocks the thread of a GPU."""
    output_device, devices = CASES[case]
    inputs, output, _ = _step(devices, output_device, [])
    home = {id(parameter): parameter.device for parameter in inputs}
    todo, seen = [output.grad_fn], 0
    while todo:
        node = todo.pop()
        of = {made.device for made in node._input_metadata}
        for below, _ in node.next_functions:
            if below is None:
                continue
            if (variable := getattr(below, "variable", None)) is not None:
                seen += 1
                assert of == {home[id(variable)]}
            else:
                todo.append(below)
        if "Commit" in node.name():
            assert of == {CPU}
    assert seen == len(inputs)


def test_a_gradient_is_taken_without_a_copy():
    for output_device in (CPU, META):
        gradients = [torch.ones(1)]
        where = gradients[0].data_ptr()

        def finish(_, gradients=gradients):
            return [gradients.pop()]

        parameter = nn.Parameter(torch.zeros(1))
        (output,) = attach_commit(finish, [torch.zeros(2, device=output_device)], [parameter])
        output.sum().backward()
        assert parameter.grad.data_ptr() == where


@pytest.mark.parametrize("output_device", [CPU, META])
def test_it_runs_once_and_cannot_be_differentiated(output_device):
    (parameter,), output, _ = _step([CPU], output_device, [torch.ones(1)])
    (gradient,) = torch.autograd.grad(output.sum(), [parameter], create_graph=True, retain_graph=True)
    assert gradient.requires_grad
    with pytest.raises(StateError, match="cannot be differentiated again"):
        gradient.sum().backward()
    with pytest.raises(StateError, match="has already run"):
        output.sum().backward()


def test_the_first_gradient_of_a_sum_is_not_written_to():
    """Autograd may hand out one tensor for several parameters."""
    shared, second, third = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    total = None
    for count, gradient in enumerate([shared, second, third]):
        before = total
        total = add_gradient(total, gradient, count)
        assert (total is before) == (count == 2), "only the sum that is ours is added to in place"
    assert torch.equal(shared, torch.ones(2))
    assert torch.equal(total, torch.full((2,), 6.0))
