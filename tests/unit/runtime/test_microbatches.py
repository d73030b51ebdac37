"""The micro-batches of a step: cut and put together again, or passed by the caller, of one program or of several."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import StateError, UnequalOutputsError
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.step_inputs import check_programs_fit, gather, scatter, scatter_gradient
from fxpipe.utils.batch_split import samples_per_micro_batch


def test_sizes_are_those_of_the_parts_and_the_larger_ones_come_first() -> None:
    assert samples_per_micro_batch(7, 3) == [3, 2, 2]
    for batch in range(9):
        for count in range(1, 6):
            assert samples_per_micro_batch(batch, count) == [
                len(part) for part in torch.arange(batch).tensor_split(count)
            ]


def test_parts_are_as_dense_as_the_whole() -> None:
    whole = torch.randn(3, 8)
    (first, turned), (second, _) = scatter([whole, whole.t()], [1, 0], 2)
    assert first.is_contiguous()
    assert second.is_contiguous()
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert not turned.is_contiguous()


@pytest.mark.parametrize(("how", "shapes"), [(1, [(2, 5), (3, 5)]), ("mean", [(3,), (1,)]), ("stack", [(1,), (2,)])])
def test_parts_that_cannot_be_put_together_are_refused_by_name(how: Any, shapes: list[tuple[int, ...]]) -> None:
    """Broadcast they would add up to something else."""
    parts = [torch.zeros(shape) for shape in shapes]
    message = re.escape(f"the output 3 comes out of micro-batches with the shapes {shapes[0]}")
    with pytest.raises(UnequalOutputsError, match=message):
        gather(parts, how, [0.5, 0.5], "the output 3")


@pytest.mark.parametrize("how", ["mean", "sum", "stack", 0, 1, None])
def test_the_gradient_of_what_is_put_together_is_that_of_its_parts(how: Any) -> None:
    weights = [3 / 7, 2 / 7, 2 / 7]
    shapes = [torch.Size((size, 2)) for size in (3, 2, 2)] if how == 0 else [torch.Size((2, 2))] * 3
    parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
    like = gather(parts, how, weights)
    gradient = torch.randn(like.shape)
    # `gather` detaches: here what it does, with autograd.
    whole = {
        "mean": lambda: sum(part * weight for part, weight in zip(parts, weights, strict=True)),
        "sum": lambda: sum(parts),
        "stack": lambda: torch.stack(parts),
        None: lambda: parts[0],
    }.get(how, lambda: torch.cat(parts, how))()
    assert torch.equal(whole, like)
    want = torch.autograd.grad(whole, parts, gradient, allow_unused=True)
    for w, h in zip(want, scatter_gradient(gradient, shapes, how, weights), strict=True):
        assert (w is None) == (h is None)
        assert w is None or torch.equal(w, h)


MODEL = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
STATISTICS = "1.running_mean"


def stage_of(*attributes: str, changed: tuple[str, ...] = (), assigns: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(attributes=attributes, changes=(*changed, *assigns), assigns=assigns)


def program_of(*stages: Any) -> Any:
    changes = [name for stage in stages for name in stage.changes]
    return SimpleNamespace(program=SimpleNamespace(stages=stages, changes=changes))


def check(programs: list[Any], constants: tuple[dict[str, torch.Tensor], ...] = ({}, {})) -> None:
    check_programs_fit(programs, [ModelTensors(MODEL, own) for own in constants])


def test_programs_whose_buffers_change_in_the_same_stage_fit() -> None:
    changes = stage_of(STATISTICS, changed=(STATISTICS,))
    check([program_of(stage_of("0.weight"), changes), program_of(stage_of(), stage_of("0.weight", STATISTICS))])


@pytest.mark.parametrize("other", [stage_of(STATISTICS), stage_of(assigns=(STATISTICS,))])
def test_a_buffer_that_changes_in_one_stage_and_is_in_another_is_refused(other: Any) -> None:
    changes = stage_of(STATISTICS, changed=(STATISTICS,))
    with pytest.raises(
        StateError, match=r"take 2 graphs, .*'1.running_mean', which forward changes, is in stages 0 and"
    ):
        check([program_of(stage_of(), changes), program_of(other, stage_of())])


def test_a_name_of_two_tensors_that_want_a_gradient_is_refused() -> None:
    programs = [program_of(stage_of("constant_0")), program_of(stage_of("constant_0"))]
    constants = tuple({"constant_0": torch.zeros(2)} for _ in range(2))
    check(programs, constants)
    for own in constants:
        own["constant_0"].requires_grad_()
    with pytest.raises(StateError, match="'constant_0' is not the same tensor"):
        check(programs, constants)
