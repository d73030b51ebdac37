"""`fxpipe.pipeline` and its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack

import torch
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.planning.options.pipeline_options import CutAndModelOptions, make_settings, shows_options
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.retarget import replicas_in_turn
from fxpipe.planning.tuning.candidates import with_best_schedule
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.utils.units import parse_number, with_article

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def is_over_ranks(devices: Any) -> TypeGuard[DeviceMesh | ProcessGroup]:
    """Returns True if `devices` is a mesh or process group rather than devices of this process."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed import GroupMember, ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(devices, (DeviceMesh, ProcessGroup)) or devices is GroupMember.NON_GROUP_MEMBER


@shows_options(CutAndModelOptions, after="example_kwargs")
def pipeline(
    model: nn.Module,
    devices: int | Sequence[str | torch.device] | DeviceMesh | ProcessGroup | None = None,
    chunks: int | str = "auto",
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    deferred_batch_norm: bool = False,
    compile: bool | Mapping[str, Any] = False,
    plan: Plan | None = None,
    outputs: str = "last",
    timeout: float | None = None,
    data_parallel: DeviceMesh | ProcessGroup | None = None,
    **options: Unpack[CutAndModelOptions],
) -> Pipeline:
    """Makes a pipeline of any module.

        pipe = fxpipe.pipeline(model, devices=["cuda:0", "cuda:1"], chunks=8)
        loss_fn(pipe(x), target).backward()                             # a drop-in: any training loop works as it is
        loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn) # forward and backward interleaved: less memory

    The model keeps its parameters and their names, so optimizers made before or after are valid. On GPUs the parameters
    move to the devices of their stages, and the plain model can no longer be called.

    Args:
        model: any `nn.Module`.
        devices: one device for each worker; a device may be listed several times (`["cpu", "cpu"]` is two workers, each
            with its share of the cores). A number: the first devices of torch's accelerator, or that many CPU workers
            without an accelerator. None: all devices of the accelerator, or two CPU workers. Reports and pictures
            number devices in the order of this list. Or a `DeviceMesh` of one dimension, or a process group, of
            `torch.distributed`: each rank calls this with the same arguments and runs the row of one device
            (`fxpipe.distributed`). A model on the meta device is planned without values; each rank then loads or
            initializes its stages (`fxpipe.distributed.load`, `fxpipe.distributed.initialize`).
        chunks: number of micro-batches into which a mini-batch is cut, at most one for each sample. "auto": of 1, 2, 4,
            ..., the number with the shortest simulated step of `schedule` that fits into memory, as `fxpipe.tune` finds
            it. It is chosen for the first mini-batch, and again for each mini-batch with more samples than any before;
            mini-batches without gradients count only until the first one with gradients. It depends on the measured
            profile: pass a number, or a `profile`, if runs must be equal to the last bit. With "pipedream" it is 1, or
            the number in the plan.
        example_args, example_kwargs: inputs to plan with. Without them planning waits for the first call.
        balance: how the graph is cut. "block": least time of the slowest stage, and stages as even as possible.
            "optimal": as "block", including what stages send and hold, within memory. "auto" is "optimal" if anything
            but time matters (a memory limit, links, unequal devices), else "block". "pipedream": PipeDream's (Narayanan
            et al., 2019): least time of the slowest of all stages, boundaries, and reductions of gradients. With
            `hardware` it also chooses the number of devices of each stage, as replicas that take micro-batches in turn
            (`fxpipe.scheduling.replicas`), also in a stream. Over processes each stage has `data_parallel` replicas.
            By hand: numbers of nodes; names of modules or nodes after which a stage ends; a dict from modules to
            devices. `fxpipe.cut()` in forward also ends a stage.
        pin: modules or nodes, by name -> their device: a number in `devices`, or its name.
        stages_per_device: number of stages of each worker. Stage j is on worker j modulo the number of workers. By
            default 1, or what the schedule needs: 2 for interleaved and V-shaped schedules.
        schedule: order of `forward_backward`; the drop-in always runs gpipe's. See `fxpipe.scheduling.registry`:

            "gpipe"             all forwards, then all backwards: keeps every micro-batch
            "1f1b"              backward as soon as possible: keeps few micro-batches, idles as long as gpipe
            "interleaved_1f1b"  1f1b with several stages per device: idles less, sends more
            "zero_bubble"       backward split, gradients of weights fill the gaps: a third of the idling of 1f1b
            "zero_bubble_2p"    zero_bubble with twice the memory: if gradients of weights take less time than the rest
            "interleaved_zero_bubble"  zero_bubble with v stages per device: idles a v-th of it
            "zbv"               zero_bubble with two stages per device, there and back: a sixth of the idling of 1f1b
            "dualpipev"         as zbv, backward mostly in one piece
            "v_half", "v_min"   as zbv, with half and a third of the memory of 1f1b; idle longer
            "pipedream"         no flush and no idling in `train_stream`, on stale weights, of which stage j of n keeps
                                n - j versions; a step of `forward_backward` is one of 1f1b
            "pipedream_2bw"     pipedream with two versions of the weights
            "auto"              the shortest simulated step that fits into memory, with 1, 2 or 4 stages per device
                                unless `stages_per_device`, `pin`, `balance` or `checkpoint` fix the number; with a
                                plan, the best for its stages

            Or a custom schedule, one line per device: text, a `fxpipe.scheduling.Schedule`, or a pure function
            (micro_batches, stages) -> text or rows. 1f1b of two stages and two micro-batches (stage, F or B,
            micro-batch; W computes the gradients of weights that B leaves out, R recomputes):

                0F0 0F1 0B0 0B1
                1F0 1B0 1F1 1B1

            A table has a fixed number of micro-batches; a mini-batch with fewer samples runs the first of them.
        checkpoint: which micro-batches are recomputed before their backward: "never", "except_last", "always", or a
            list with a mode for each stage. "auto": all micro-batches of stages that would not fit into memory
            otherwise. If it makes a step shorter, such a stage is cut into two on its device, and one of the two
            recomputes (see the plan's `placement`), unless `balance`, `fxpipe.cut()`, `stages_per_device` or the
            schedule fix the number of stages.
        memory_limit: for the stages of a device: "70GiB", bytes, or a list with an entry for each device. Default: the
            memory of a GPU less a margin; none on the CPU. The limit is computed for `schedule`. The drop-in keeps all
            micro-batches: plan it with schedule="gpipe".
        optimizer_state: bytes of the optimizer's state for each byte of a trained parameter: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
        hardware: plan for this hardware instead of measuring; as for `fxpipe.plan`.
        profile: costs measured before (`fxpipe.profile`), or a file of them, instead of measuring.
        profile_budget: approximate seconds to measure for; 5 by default. Measuring on an accelerator resets its peak
            memory statistics (`torch.cuda.max_memory_allocated`).
        loss_fn, target: the loss of the steps, as for `forward_backward`, and a target for the example inputs. The plan
            then includes the cost of the loss, which is called a few times. If the model computes its loss, leave both
            out.
        in_dims: which dimension of each input holds the batch: an int, a tuple with an entry for each input, or a dict
            by name; None for an input without a batch. Found by trying if it is dimension 0. Inputs, outputs and target
            may have k consecutive rows for each sample (tiles of images, boxes).
        out_dims: how the outputs of micro-batches are combined, if that cannot be found: a dimension, None (equal in
            all), "mean", "sum", "stack"; one for all, a tree like the output, or a dict of some of its fields
            ({"loss": "sum"}). "mean" and "sum" alone are for all outputs without a dimension that holds the batch. It
            is not checked.
        dynamic_shapes: dimensions of inputs whose sizes change from batch to batch, as in `torch.export`: a dict from
            inputs to a dict from dimensions to names or `torch.export.Dim` (`{"ids": {1: "length"}, "mask": {1:
            "length"}}`). Dimensions of one name have one size; a Dim has bounds. Otherwise a dimension becomes dynamic
            when a second size arrives, except with `Dim.STATIC`. The batch always varies: naming it gives it bounds.
        leaf_modules: names or classes of opaque modules: their Python runs for each micro-batch, as one node.
        check: compare each graph with the model on real values before it is used.
        progress: show a bar, or one line in a log, if planning takes longer than two seconds.
        deferred_batch_norm: update the running statistics of batch norm (`nn.BatchNorm*d`, `F.batch_norm`) once per
            step, from the whole mini-batch, to rounding; by default each micro-batch updates them. Each micro-batch is
            normalized by its own statistics in any case, and so needs more than one value for each channel. As in
            torchgpipe (Kim et al., 2020), but the modules are not replaced.
        compile: compile stages with `torch.compile`: True, or a dict of its keywords. The backward of compiled stages
            is not split: B computes all gradients, also in zero-bubble schedules. Not with CUDA graphs, which keep the
            values of only one micro-batch.
        plan: an existing plan whose stages are used, and its devices, chunks and checkpoint, unless passed. A plan with
            replicas takes a device for each, the replicas of a stage one after another; in one process they take the
            micro-batches of a mini-batch in turn, also replicas from `data_parallel` of `fxpipe.plan`. The plan does
            not set the schedule: `fxpipe.pipeline(model, **tuning.best.arguments)` uses the plan that `fxpipe.tune`
            found, with its schedule. Options of planning (balance, pin, memory_limit, optimizer_state, hardware,
            profile, profile_budget) are refused next to it.
        outputs: over processes, which ranks get what a call returns: "last", the rank of the last stage, or "all".
        data_parallel: over processes, the ranks with the same stages in other replicas of the pipe: a one-dimensional
            `DeviceMesh` or a process group. For a mesh ("data", "pipe"), pass `devices=mesh["pipe"],
            data_parallel=mesh["data"]`. Each replica trains on its own mini-batch; see
            `fxpipe.distributed.DistributedPipeline`.
        timeout: over processes, seconds after which a rank that does not answer counts as hung; 1800 by default.

    Raises:
        FxpipeError: an argument cannot be used, or the model cannot be traced or cut; see `fxpipe.errors`.
        Exception: what the model itself raises on the example inputs, with a note.

    Warns:
        UserWarning: the model can be trained, but evaluating it will be refused; says why. Issued with the plan, unless
            a plan was passed.
    """
    arguments = dict[str, Any](options, chunks=chunks, deferred_batch_norm=deferred_batch_norm, compile=compile)
    if isinstance(model, Pipeline):
        raise ArgumentTypeError("model is a Pipeline already; give the model it was made from: fxpipe.unwrap(pipe)")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is {with_article(model)}; expected a torch.nn.Module")
    if not isinstance(example_args, tuple):
        raise ArgumentTypeError(f"example_args is {with_article(example_args)}; expected a tuple of inputs, as in (x,)")
    if example_kwargs is not None and not isinstance(example_kwargs, dict):
        raise ArgumentTypeError(f"example_kwargs is {with_article(example_kwargs)}; expected a dict of inputs by name")
    if is_over_ranks(devices):
        from fxpipe.distributed import pipeline_over_ranks

        seconds = 1800.0 if timeout is None else parse_number("timeout", timeout, "seconds")
        arguments, inputs = {**arguments, "data_parallel": 1}, (example_args, example_kwargs or {})
        return pipeline_over_ranks(model, devices, arguments, plan, outputs, seconds, data_parallel, *inputs)
    only_over_ranks = (("outputs", outputs, "last"), ("timeout", timeout, None), ("data_parallel", data_parallel, None))
    for name, value, default in only_over_ranks:
        if value != default:
            raise ArgumentError(
                f"{name}={value!r} is for a pipe over processes: give devices=<DeviceMesh or ProcessGroup>, or leave "
                "it out"
            )
    if isinstance(plan, Plan):
        plan = replicas_in_turn(plan, options.get("schedule"))
    settings = make_settings({**arguments, "devices": devices}, plan, runs_here=True)
    if plan is not None and settings.left:
        settings = with_best_schedule(plan, settings)
    pipe = Pipeline(model, settings, plan)
    if example_args or example_kwargs:
        if names_without_values(model):
            pipe._fxpipe.plan_ahead(example_args, example_kwargs or {})
        else:
            pipe._fxpipe.find([ModelCall(example_args, example_kwargs or {}, ())], in_one=False)
    return pipe
