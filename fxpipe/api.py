"""`fxpipe.pipeline`: its arguments, and what each of them means."""

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
from fxpipe.planning.tuning.auto_options import with_best_schedule
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.utils.units import parse_number, with_article

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def is_over_ranks(devices: Any) -> TypeGuard[DeviceMesh | ProcessGroup]:
    """Returns whether these are the processes of a group, and not devices of this one."""
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

    The model keeps its parameters under their names; optimizers made before or after are valid. On GPUs its parameters
    move to the devices of their stages, and the plain model can then no longer be called.

    Args:
        model: any `nn.Module`, as it is.
        devices: one for each worker; a device may be listed more than once (`["cpu", "cpu"]` is two workers, each
            with its share of the cores). A number: the first devices of torch's accelerator, or that many CPU workers
            if it has none. None: all of the accelerator, or two CPU workers. In all that is printed and drawn, device 0
            is the first entry here, device 1 the second, also where they name the same.
            Or a `DeviceMesh` of one dimension, or a process group, of `torch.distributed`: each of its ranks calls this
            with the same arguments, and runs the row of one device (`fxpipe.distributed`). A model that was built on
            the meta device is planned without values, and each rank then gives some to its own stages alone
            (`fxpipe.distributed.load`, `fxpipe.distributed.initialize`).
        chunks: number of micro-batches a mini-batch is cut into; fewer where it has fewer samples. "auto": the number
            of 1, 2, 4, ... with the shortest simulated step of `schedule` that fits into memory, as `fxpipe.tune` finds
            it, which also prints what it chose from. It is chosen with the plan, for the first mini-batch, and again at
            each that has more samples than any before, for the stages as they are then; mini-batches without gradients
            count only until one comes with them. It depends on the profile: seconds that are measured anew may lead to
            another number, and other numbers round in other ways. Say a number, or give a `profile`, where runs must
            be equal to the last bit. With "pipedream" it is 1, or the number of a plan for it.
        example_args, example_kwargs: inputs to plan with. Without them planning waits for the first call.
        balance: how the graph is cut. "block": least time of the slowest stage, and stages as even as can be.
            "optimal": the same with what stages send and hold, within memory. "auto" is "optimal" where anything but
            time matters (a limit of memory, links, unequal devices), else "block". "pipedream": PipeDream's (Narayanan
            et al., 2019): least time of the slowest of all stages, boundaries, and reductions of gradients. With
            `hardware` it also chooses how many of the devices each stage has, as replicas that take micro-batches in
            turn (`fxpipe.scheduling.replicas`), of a stream too; without, each stage has one. Over processes each has
            as many as `data_parallel` says.
            By hand: numbers of nodes; names of modules or nodes after which a stage ends, as few as you like; a
            dict from modules to devices. `fxpipe.cut()` in forward ends a stage, too.
        pin: modules or nodes, by name -> the device they must be on: a number in `devices`, or its name.
        stages_per_device: how many stages each worker has. Stage j is on worker j modulo their number, so that a
            micro-batch goes round as often: each stage is shorter, and a device waits less before its first one. By
            default 1, or what the schedule wants: 2 for the interleaved ones and those there and back.
        schedule: of `forward_backward`; the drop-in always runs gpipe's order. See `fxpipe.scheduling.registry`:

            "gpipe"             all forwards, then all backwards: keeps every micro-batch
            "1f1b"              backward as soon as it can be: keeps few, idles as long
            "interleaved_1f1b"  the same with several stages per device: idles less, sends more
            "zero_bubble"       backward split, gradients of weights fill the gaps: a third of the idling of 1f1b
            "zero_bubble_2p"    the same with twice the memory: pays where gradients of weights take less than the rest
            "interleaved_zero_bubble"  zero_bubble with v stages per device: idles a v-th of it
            "zbv"               zero_bubble with two stages per device, there and back: a sixth
            "dualpipev"         the same, backward mostly in one piece
            "v_half", "v_min"   the same with half and a third of the memory of 1f1b; idle longer
            "pipedream"         no flush and no idling in `train_stream`, on stale weights, of which stage j of n keeps
                                n - j versions; a step of `forward_backward` is one of 1f1b
            "pipedream_2bw"     the same with two versions
            "auto"              the one with the shortest simulated step that fits into memory, with 1, 2 or 4 stages
                                per device unless `stages_per_device`, `pin`, `balance` or `checkpoint` say how
                                many there are; with a plan, whose stages stay where they are, the best for them

            Or your own, a line for each device, as text, as a `fxpipe.scheduling.Schedule`, or as a pure function
            (micro_batches, stages) -> text or rows. This is 1f1b of two stages and two micro-batches (stage, F or B,
            micro-batch; W makes the gradients of weights where B is to leave them out, R recomputes):

                0F0 0F1 0B0 0B1
                1F0 1B0 1F1 1B1

            A table has as many micro-batches as it says; of a mini-batch with fewer samples the first ones run.
        checkpoint: which micro-batches are recomputed before their backward instead of being kept: "never",
            "except_last", "always", or a list with a mode for each stage. "auto": all in those stages that would not
            fit into their memory otherwise, and no more of such a stage than has to be, where that makes a step
            shorter: it is then cut into two parts on its device, of which one keeps and one recomputes. Each is a stage
            of the plan, as its `placement` shows. Not where `balance`, `fxpipe.cut()`, `stages_per_device` or
            the schedule say how many stages there are.
        memory_limit: what stages may take on a device: "70GiB", bytes, or a list with one for each device. Default:
            the memory of a GPU less a margin; none on the CPU. Reckoned for `schedule`: the drop-in, which keeps all
            micro-batches, needs schedule="gpipe" for its limit to hold.
        optimizer_state: bytes of the optimizer's state for each byte of a trained parameter: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
        hardware: plan for this hardware instead of measuring what is here; as for `fxpipe.plan`.
        profile: costs measured before (`fxpipe.profile`), or a file of them, instead of measuring.
        profile_budget: seconds to measure for, at most about; 5 by default. To measure on an accelerator resets its
            peak memory statistics (`torch.cuda.max_memory_allocated`), which torch cannot set back.
        loss_fn, target: the loss that steps will take, as for `forward_backward`, and a target of the example inputs.
            What it costs is then a part of the plan, and the cut heeds it; for that it is called a few times. Where the
            model takes its own loss, leave both out.
        tracer: "record" records what forward runs, with values that it reads as guards, and keeps modules whole where
            that is needed. A function from the model to a `torch.fx.GraphModule` makes the graph in its place.
        in_dims: which dimension of each input holds the batch: an int, a tuple with an entry for each input, or a dict
            by name; None for an input without a batch. Found by itself where that is dimension 0. An input that is
            said to hold the batch may have k rows for each sample, one after the other (tiles of images, boxes), and
            so may outputs and target: those of a sample are in one micro-batch.
        out_dims: how the outputs of micro-batches go together, where that cannot be seen: a dimension, None (the same
            for all), "mean", "sum", "stack"; one for all, a tree like the output, or a dict of some of its fields
            ({"loss": "sum"}). "mean" and "sum" alone are for all outputs without a dimension that holds the batch.
            What you say is taken as it is, and not compared.
        dynamic_shapes: dimensions of inputs whose sizes change from batch to batch, said from the start, as in
            `torch.export`: a dict from inputs to a dict from dimensions to names or `torch.export.Dim`
            (`{"ids": {1: "length"}, "mask": {1: "length"}}`). Dimensions of one name are of one size; a Dim has a least
            and a largest. Without it a dimension becomes dynamic when it comes with a second size; with `Dim.STATIC`
            it does not. The batch always varies: to name it gives it bounds.
        leaf_modules: names or classes of modules to keep whole: their Python runs for each micro-batch, as one node.
        check: compare each graph with the model on real values before it is used.
        progress: show a bar if planning takes longer than two seconds, on a terminal or in a notebook, and one line in
            a log.
        deferred_batch_norm: the running statistics of batch norm (`nn.BatchNorm*d`, `F.batch_norm`) after a step are
            those that the whole mini-batch gives, to rounding, and it counts one step; by default they are updated by
            each micro-batch in turn. Either way each micro-batch is normalised by its own statistics, and so needs
            more than one value for each channel. As in torchgpipe (Kim et al., 2020), but the modules stay as they are.
        compile: whether stages are compiled by `torch.compile`: True, or a dict of its keywords. Their backward is not
            split: B makes all gradients in the zero-bubble schedules, too. Not with CUDA graphs, which keep the values
            of one micro-batch only.
        plan: a plan made before, whose stages are used again; and its devices, chunks and checkpoint, where none are
            given. One with replicas takes a device for each, those of a stage one after the other; in one process they
            take the micro-batches of a mini-batch in turn, also those that `data_parallel` of `fxpipe.plan` means. The
            schedule is not taken from it, but `fxpipe.pipeline(model, **tuning.best.arguments)` is the plan that
            `fxpipe.tune` found, with its schedule. What says how to plan (balance, pin, memory_limit, optimizer_state,
            hardware, profile, profile_budget) is refused beside it.
        outputs: over processes, who gets what a call returns: "last", the rank of the last stage, or "all".
        data_parallel: over processes, the ranks that have the same stages in other replicas of the pipe, as a
            `DeviceMesh` of one dimension or a process group: of a mesh ("data", "pipe"), `devices=mesh["pipe"],
            data_parallel=mesh["data"]`. Each replica trains on a mini-batch of its own; see
            `fxpipe.distributed.DistributedPipeline`.
        timeout: over processes, the seconds that a rank waits for another before it takes it for hung; 1800 by default.

    Raises:
        FxpipeError: an argument cannot be used, or the model cannot be traced or cut so; see `fxpipe.errors`.
        Exception: what the model itself raises on the example inputs, with a note.

    Warns:
        UserWarning: the model can be trained so, but will be refused when it is evaluated; says why. Told with the
            plan, unless the plan was given.
    """
    arguments: dict[str, Any] = {
        **options,
        "chunks": chunks,
        "deferred_batch_norm": deferred_batch_norm,
        "compile": compile,
    }
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
        return pipeline_over_ranks(
            model,
            devices,
            {**arguments, "data_parallel": 1},
            plan,
            outputs,
            seconds,
            data_parallel,
            example_args,
            example_kwargs or {},
        )
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
