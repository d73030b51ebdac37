"""On GPUs a pipeline equals the plain model as well: two stages on one, on two, and one beside the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from models import CASES
from oracle import parts_of
from torch.utils import _pytree as pytree

import fxpipe

ONE = pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.cuda, id="one")
MIXED = pytest.param(["cpu", "cuda:0"], marks=pytest.mark.cuda, id="mixed")
TWO = pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multi_gpu, id="two")
BATCH, CHUNKS = 6, 3


def _without_dropout(model):
    """Random numbers of a GPU are others than those of the CPU."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _close(have, want):
    torch.testing.assert_close(have.cpu(), want.cpu(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pipeline_on_gpus_equals_the_plain_model(case, devices, checkpoint):
    plain = _without_dropout(case.make())
    args, kwargs = case.inputs(BATCH)
    target = case.target(BATCH)
    pipe = fxpipe.pipeline(
        copy.deepcopy(plain), devices, CHUNKS, example_args=args, example_kwargs=kwargs, checkpoint=checkpoint
    )
    with pipe:
        for drop_in in (False, True):
            for model in (plain, pipe):
                model.zero_grad()
            plain.load_state_dict(pipe.state_dict())
            for (a, k), t in zip(parts_of((args, kwargs), CHUNKS, BATCH), parts_of(target, CHUNKS, BATCH), strict=True):
                (case.loss(plain(*a, **k), t) / CHUNKS).backward()
            if drop_in:
                case.loss(pipe(*args, **kwargs), target.to(devices[-1])).backward()
            else:
                pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
            for (name, want), have in zip(plain.named_parameters(), pipe.parameters(), strict=True):
                assert (want.grad is None) == (have.grad is None), name
                if want.grad is not None:
                    assert have.grad.device == have.device, name
                    _close(have.grad, want.grad)
            for want, have in zip(plain.buffers(), pipe.buffers(), strict=True):
                _close(have, want)


@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eval_on_gpus_equals_the_plain_model(case, devices):
    """A graph of its own, recorded when the parameters are on the devices of their stages already."""
    plain = case.make()
    args, kwargs = case.inputs(BATCH)
    with fxpipe.pipeline(copy.deepcopy(plain), devices, CHUNKS, example_args=args, example_kwargs=kwargs) as pipe:
        plain.eval()
        pipe.eval()
        with torch.no_grad():
            want, have = plain(*args, **kwargs), pipe(*args, **kwargs)
        for w, h in zip(pytree.tree_leaves(want), pytree.tree_leaves(have), strict=True):
            if isinstance(w, torch.Tensor):
                _close(h, w)
            else:
                assert w == h
