"""Micro-batches of one step: cut, or handed over, of one program or of several that fit together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe.errors import StateError
from fxpipe.runtime.bound_program import ModelTensors
from fxpipe.runtime.step_inputs import StepInputs, TrainedInput, check_programs_fit

MODEL = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
STATISTICS = "1.running_mean"


def stage_of(*attributes: str, changed: tuple[str, ...] = (), assigns: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(attributes=attributes, changes=(*changed, *assigns), assigns=assigns)


def program_of(*stages: Any, in_dims: Any = (0,), written: Any = ()) -> Any:
    changes = [name for stage in stages for name in stage.changes]
    program = SimpleNamespace(stages=stages, written_inputs=written, changes=changes)
    return SimpleNamespace(program=program, in_dims=in_dims)


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


def test_a_mini_batch_is_cut_and_its_gradient_is_one() -> None:
    x = torch.zeros(5, 2, requires_grad=True)
    inputs = StepInputs.of_mini_batch(program_of(in_dims=(0, None)), [x, 3], [0.6, 0.4])
    assert [[len(part[0]), part[1]] for part in inputs.parts] == [[3, 3], [2, 3]]
    assert inputs.trained == (TrainedInput(x, 0, range(2), 0),)
    assert len(inputs.programs) == 1


def test_micro_batches_are_taken_as_they_are_and_each_has_a_gradient_of_its_own() -> None:
    x, y = torch.zeros(5, 2, requires_grad=True), torch.zeros(1, 2)
    first, second = program_of(), program_of(written={0: None})
    inputs = StepInputs.of_micro_batches([first, second, first], [[x], [y], [x]], [5 / 11, 1 / 11, 5 / 11])
    assert inputs.parts[0][0] is x
    assert inputs.parts[1][0] is not y  # forward writes to it
    assert inputs.trained == (TrainedInput(x, 0, range(1), None), TrainedInput(x, 0, range(2, 3), None))
    assert inputs.programs == [first, second]
