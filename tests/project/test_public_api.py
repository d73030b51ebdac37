"""The public API, written down: what changes it changes this file, and the changelog."""

import importlib
import inspect
import subprocess
import sys

import pytest

import fxpipe

# Module -> its public names. Everything else may change from version to version.
PUBLIC = {
    "fxpipe": """
        Hardware Pipeline Plan Profile Tuning Verification cut distributed errors is_planning is_recomputing leaf optim
        pipeline plan profile simulate trace tune unwrap verify
    """,
    "fxpipe.distributed": "DistributedPipeline clip_grad_norm_ initialize load pipeline_over_ranks",
    "fxpipe.errors": """
        ArgumentError ArgumentTypeError DecisionError DistributedError FileError FxpipeError InternalError LossError
        MemoryLimitError PartitionError ScheduleError StateError TooManyStagesError TorchVersionError TraceError
        UnequalOutputsError
    """,
    "fxpipe.integrations.transformers": "PipelineTrainer",
    "fxpipe.optim": "StageOptimizer",
    "fxpipe.scheduling": """
        CHECKPOINTS SCHEDULES STREAM_POLICIES Action ActionKind Checkpoint Rows Schedule ScheduleLike
        StreamSchedule WeightPolicy
    """,
}
# Besides what its model has.
OF_A_PIPE = "close compile forward_backward last_step model plan train_stream"
# Their arguments; those behind * are given by name.
ARGUMENTS = {
    "pipeline": """
        model devices chunks * example_args example_kwargs balance pin stages_per_device schedule checkpoint
        memory_limit optimizer_state hardware profile profile_budget loss_fn target in_dims
        dynamic_shapes out_dims leaf_modules check progress deferred_batch_norm compile plan outputs timeout
        data_parallel
    """,
    "plan": """
        model stages * example_args example_kwargs devices chunks balance pin stages_per_device schedule
        checkpoint memory_limit optimizer_state hardware profile profile_budget loss_fn target in_dims
        dynamic_shapes out_dims leaf_modules check progress data_parallel mesh processes
    """,
    "profile": """
        traced args kwargs * micro_batch second budget repeats threads hardware device
        loss_fn target progress
    """,
    "trace": """
        model args kwargs * in_dims out_dims chunks leaf_modules check seed progress dynamic_shapes
        dynamic is_whole
    """,
    "simulate": """
        plan * schedule chunks checkpoint batch hardware data_parallel mesh overlaps processes
        updates **sizes
    """,
    "tune": """
        model_or_plan devices * example_args example_kwargs batch_size schedules chunks checkpoint
        stages_per_device balance memory_limit optimizer_state hardware profile profile_budget
        loss_fn target in_dims dynamic_shapes out_dims leaf_modules check progress data_parallel mesh
        processes
    """,
    "Pipeline.forward_backward": """
        *args target loss_fn reduction grad_scaler micro_batches optimizer return_outputs **kwargs
    """,
    "optim.StageOptimizer": "pipe optimizer_class **kwargs",
    "cut": "",
    "leaf": "function",
    "unwrap": "model",
    "verify": "pipe *args target loss_fn reduction **kwargs",
    "is_recomputing": "",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if getattr(value, "__module__", "") == name and key[0] != "_"
    ]
    public = PUBLIC[name].split()
    if name == "fxpipe.scheduling":  # which exports to other packages, too: the functions of its schedules
        assert {*public} <= {*exported}
    else:
        assert sorted(exported) == public
    for key in public:
        assert getattr(module, key) is not None


def test_what_a_pipe_has_beside_its_model():
    own = {key for key in vars(fxpipe.Pipeline) if not key.startswith("_")}
    overridden = {"extra_repr", "load_state_dict", "state_dict"}
    assert sorted(own - overridden) == OF_A_PIPE.split()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    value = fxpipe
    for part in name.split("."):
        value = getattr(value, part)
    assert argument_names(value) == ARGUMENTS[name].split()


def argument_names(function):
    """`["x", "*", "y", "**z"]`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    names = [stars.get(p.kind, "") + p.name for p in parameters]
    by_name = [k for k, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if by_name and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names.insert(by_name[0], "*")
    return names


def test_errors_can_be_named_before_anything_ran():
    code = "import fxpipe\nprint(fxpipe.errors.FxpipeError.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "FxpipeError\n"
