"""The two entry points: `pipeline` and the module it returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from fxpipe.arguments import parse_switch
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.graphs import Inside
from fxpipe.hardware import Hardware
from fxpipe.plans import Plan
from fxpipe.profiling import Profile
from fxpipe.runtime import Driver, StepRecord, driver_for
from fxpipe.runtime.losses import check_reduction, check_scaler
from fxpipe.scheduling import ScheduleLike, make_schedule
from fxpipe.settings import Settings, make_settings
from fxpipe.tracing.containers import has_values
from fxpipe.tracing.recording.fake import without_values
from fxpipe.tracing.recording.hooks import hooks_of, with_all_hooks
from fxpipe.tracing.ways import Tracer
from fxpipe.tuning.choosing import with_schedule_for


def pipeline(
    model: nn.Module,
    devices: Sequence[str | torch.device] | None = None,
    chunks: int | str = "auto",
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    balance: str | Sequence[int] | Sequence[str] | Mapping[str, Any] = "auto",
    pin: Mapping[str, Any] | None = None,
    stages_per_device: int | None = None,
    schedule: ScheduleLike = "1f1b",
    checkpoint: str | Sequence[str] = "auto",
    memory_limit: Any = None,
    optimizer_state: float = 2.0,
    hardware: str | Hardware | None = None,
    profile: Profile | str | Path | None = None,
    profile_budget: float | None = None,
    tracer: Tracer = "auto",
    in_dims: Any = None,
    out_dims: Any = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    check: bool = True,
    progress: bool = True,
    deferred_batch_norm: bool = False,
    compile: bool | Mapping[str, Any] = False,
    plan: Plan | None = None,
) -> Pipeline:
    """Makes a pipeline of any module.

        pipe = fxpipe.pipeline(model, devices=["cuda:0", "cuda:1"], chunks=8)
        loss_fn(pipe(x), target).backward()                             # a drop-in: any training loop works as it is
        loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn) # forward and backward interleaved: less memory

    The model keeps its parameters under their names; optimizers made before or after are valid. On GPUs its parameters
    move to the devices of their stages, and the plain model can then no longer be called.

    Args:
        model: any `nn.Module`, as it is.
        devices: one for each worker; a device may stand there several times (`["cpu", "cpu"]` is two workers, each
            with its share of the cores). None: all CUDA devices, or two CPU workers where there is none.
        chunks: number of micro-batches a mini-batch is cut into; fewer where it has fewer samples. "auto": the number
            of 1, 2, 4, ... with the shortest simulated step of `schedule` that fits into memory, for mini-batches like
            the first one; as `fxpipe.tune` finds it, which also prints what it chose from. It hangs on the profile:
            seconds that are measured anew may lead to another number, and other numbers round in other ways. Say a
            number, or give a `profile`, where runs must be equal to the last bit.
        example_args, example_kwargs: inputs to plan with. Without them planning waits for the first call.
        balance: how the graph is cut. "block": least time of the slowest stage, and stages as even as can be.
            "optimal": the same with what stages send and hold, within memory. "auto" is "optimal" where anything but
            time matters (a limit of memory, links, unequal devices), else "block". By hand: numbers of nodes; names
            of modules or nodes behind which a stage ends, as many as one likes; a dict from modules to devices.
            `fxpipe.cut()` in forward ends a stage, too.
        pin: modules or nodes, by name -> the device they must be on: a number in `devices`, or its name.
        stages_per_device: how many stages each worker has. Stage j is on worker j modulo their number, so that a
            micro-batch goes round as often: each stage is shorter, and a device waits less before its first one. By
            default 1, or what the schedule wants: 2 for "interleaved_1f1b" and "zbv".
        schedule: of `forward_backward`; the drop-in always runs gpipe's order. `fxpipe.scheduling.known` compares them:

            "gpipe"             all forwards, then all backwards: keeps every micro-batch
            "1f1b"              backward as soon as it can be: keeps few, idles as long
            "interleaved_1f1b"  the same with several stages per device: idles less, sends more
            "zero_bubble"       backward split, gradients of weights fill the gaps: a third of the idling of 1f1b
            "zero_bubble_2p"    the same with twice the memory: pays where gradients of weights take less than the rest
            "zbv"               the same with two stages per device, there and back (0, 1, 1, 0): a sixth
            "auto"              the one with the shortest simulated step that fits into memory, with 1, 2 or 4 stages
                                per device unless `stages_per_device`, `pin`, `balance` or `checkpoint` say how many
                                there are; with a plan, whose stages stay where they are, the best for them

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
            of the plan, as its `placement` shows. Not where `balance`, `fxpipe.cut()`, `stages_per_device` or the
            schedule say how many stages there are.
        memory_limit: what stages may take on a device: "70GiB", bytes, or a list with one for each device. Default:
            the memory of a GPU less a margin; none on the CPU. Reckoned for `schedule`: the drop-in, which keeps all
            micro-batches, needs schedule="gpipe" for its limit to hold.
        optimizer_state: bytes of the optimizer's state for each byte of a trained parameter: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
        hardware: plan for this hardware instead of measuring what is here; as for `fxpipe.plan`.
        profile: costs measured before (`fxpipe.profile`), or a file of them, instead of measuring.
        profile_budget: seconds to measure for, at most about; 5 by default.
        tracer: "auto" takes the first way that leads to a right graph: recording, with values that forward reads as
            guards; with some modules kept whole; `torch.export`. "record", "export" and "fx" (symbolic tracing) allow
            one way; a `torch.fx.Tracer`, or a function from the model to a `torch.fx.GraphModule`, is your own.
        in_dims: which dimension of each input holds the batch: an int, a tuple with an entry for each input, or a dict
            by name; None for an input without a batch. Found by itself where that is dimension 0.
        out_dims: how the outputs of micro-batches go together, where that cannot be seen: a dimension, None (the same
            for all), "mean", "sum", "stack"; one for all or a tree like the output. "mean" and "sum" alone are for all
            outputs without a dimension that holds the batch. What you say is taken as it is, and not compared.
        leaf_modules: names or classes of modules to keep whole: their Python runs for each micro-batch, as one node.
        check: compare each graph with the model on real values before it is used.
        progress: show bars while planning takes long, where stderr is a terminal.
        deferred_batch_norm: the running statistics of batch norm (`nn.BatchNorm*d`, `F.batch_norm`) after a step are
            those that the whole mini-batch gives, to rounding, and it counts one step; by default they are updated by
            each micro-batch in turn. Either way each micro-batch is normalised by its own statistics, and so needs
            more than one value for each channel. As in torchgpipe (Kim et al., 2020), but the modules stay as they are.
        compile: whether stages are compiled by `torch.compile`: True, or a dict of its keywords. Not with CUDA graphs,
            which keep the values of one micro-batch only.
        plan: a plan made before, whose stages are used again; and its devices, chunks and checkpoint, where none are
            given. The schedule is not taken from it, but `fxpipe.pipeline(model, **tuning.best.arguments)` is the plan
            that `fxpipe.tune` found, with its schedule. What says how to plan (balance, pin, memory_limit,
            optimizer_state, hardware, profile, profile_budget) is refused beside it.

    Raises:
        FxpipeError: an argument cannot be used, or the model cannot be traced or cut so; see `fxpipe.errors`.
        Exception: what the model itself raises on the example inputs, with a note.
    """
    if isinstance(model, Pipeline):
        raise ArgumentTypeError("model is a Pipeline already; give the model it was made from: pipe.model")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(example_args, tuple):
        raise ArgumentTypeError(
            f"example_args is a {type(example_args).__name__}; expected a tuple of inputs, as in (x,)"
        )
    if example_kwargs is not None and not isinstance(example_kwargs, dict):
        raise ArgumentTypeError(
            f"example_kwargs is a {type(example_kwargs).__name__}; expected a dict of inputs by name"
        )
    settings = make_settings(
        devices=devices,
        chunks=chunks,
        schedule=schedule,
        checkpoint=checkpoint,
        balance=balance,
        pin=pin,
        stages_per_device=stages_per_device,
        memory_limit=memory_limit,
        optimizer_state=optimizer_state,
        hardware=hardware,
        profile=profile,
        profile_budget=profile_budget,
        tracer=tracer,
        in_dims=in_dims,
        out_dims=out_dims,
        leaf_modules=leaf_modules,
        check=check,
        deferred_batch_norm=deferred_batch_norm,
        compile=compile,
        progress=progress,
        plan=plan,
    )
    if plan is not None and settings.left:
        settings = with_schedule_for(plan, settings)
    pipe = Pipeline(model, settings, plan)
    if example_args or example_kwargs:
        if without_values(model):
            pipe._fxpipe.plan_ahead(example_args, example_kwargs or {})
        else:
            pipe._fxpipe.assembly_for(example_args, example_kwargs or {})
    return pipe


class Pipeline(nn.Module):
    """A model that runs as a pipeline. Made by `fxpipe.pipeline`.

    It shares the model's parameters, buffers and children, so that `state_dict`, `parameters`, `train`, `eval` and
    `requires_grad_` are the model's own.
    """

    def __init__(self, model: nn.Module, settings: Settings, given: Plan | None = None, driver: Driver | None = None):
        own = self.__dict__
        own["_model"] = model  # not a child: its children are this module's own
        super().__init__()
        own["_parameters"], own["_buffers"], own["_modules"] = model._parameters, model._buffers, model._modules
        own["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        own["_fxpipe"] = Inside(model, settings, given, driver or driver_for(settings.workers))

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a mini-batch, which runs through the stages in micro-batches.

        Its backward runs once. Where the model takes its loss itself, a mean over tokens of which micro-batches hold
        unequal numbers, it raises a LossError: the mean over samples that the pipe makes of it is another one. Unless
        you have asked for that one: `out_dims="mean"`.
        """
        if not hooks_of(self.model):
            return self._run(*args, **kwargs)
        return with_all_hooks(self.model, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._fxpipe
        with inside.engine.running():
            assembly, leaves, batch = inside.assembly_for(args, kwargs)
            settings = inside.settings
            return inside.engine.call(assembly, leaves, batch, settings.chunks, settings.checkpoint, settings.placement)

    @overload
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        return_outputs: Literal[False] = False,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    @overload
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        return_outputs: Literal[True],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]: ...

    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Runs forward and backward of a mini-batch, interleaved as the schedule says; adds the gradients to `.grad`.

            loss = pipe.forward_backward(x, target=t, loss_fn=torch.nn.functional.cross_entropy)

        The gradients are those of `loss_fn(model(x), target)` on the whole mini-batch of b samples, also where its
        micro-batches differ in size. A mean over something else than samples, tokens that are no padding say, returns
        the sum and how many they are:

            def loss_fn(logits, t):  # (b, classes, length), (b, length)
                return F.cross_entropy(logits, t, reduction="sum"), (t != -100).sum()

        The loss is taken of each micro-batch. In the first step with a loss, the tenth, the hundredth and so on, it is
        taken of all gathered outputs as well, and compared by value and by gradient; such a step holds the outputs of
        the whole mini-batch. On the CPU every step, on GPUs these, checks besides that each element of the sums and
        means that the loss ends in counts the same in all micro-batches: so padding is noticed when it comes, also
        where the model itself takes the loss, which is then weighed by samples and cannot be compared. What escapes: a
        loss that is a mean over samples in those steps and is none in others. A loss that draws random numbers takes
        them from torch's generator, micro-batch by micro-batch, and is not compared where they make a difference.

        Args:
            args, kwargs: the model's inputs. (One named like an argument here has to be given by position.)
            target: a tensor, or tensors in tuples, lists, dicts and dataclasses, with the b samples in dimension 0;
                None: loss_fn takes the output alone.
            loss_fn: (output, target) -> a 0-dim floating point tensor; or a pair (total, weight), of such a tensor and
                a number or 0-dim tensor without gradient: the loss is the sum of totals over the sum of weights. It
                may be a module; what it uses gets gradients. None: the model's output is the loss. A loss inside the
                model's output: `lambda out: out.loss`.
            reduction: "mean": the loss is a mean over samples. "sum": it is a sum. Not used for pairs.
            grad_scaler: scales the loss for backward, as `grad_scaler.scale(loss).backward()` does; then call
                `grad_scaler.step(optimizer)` and `grad_scaler.update()` as ever.
            return_outputs: return (loss, outputs). Without it an output is gone with its micro-batch.

        Returns:
            The loss of the mini-batch: 0-dim, detached, unscaled, on the last stage's device. With `return_outputs` the
            pair of it and what the model returns for the mini-batch, detached, gathered as a call gathers it.

        Raises:
            LossError: the loss is no scalar, does not require grad, or is not what the losses of micro-batches add up
                to. As after any exception, gradients and buffers are as before.
            ArgumentError: target has another batch than the inputs, or the inputs cannot be cut.
            StateError: gradients are off, the pipe is closed, or another step is running.

        Source: forward and backward interleaved without stale weights is PipeDream-Flush, Narayanan et al.,
        Memory-Efficient Pipeline-Parallel DNN Training, 2021, https://arxiv.org/abs/2006.09503; there, micro-batches
        all count the same.
        """
        check_reduction(reduction)
        check_scaler(grad_scaler)
        parse_switch("return_outputs", return_outputs)
        if isinstance(loss_fn, type):
            raise ArgumentTypeError(f"loss_fn is the class {loss_fn.__name__}; give an instance: {loss_fn.__name__}()")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentTypeError(
                f"loss_fn is a {type(loss_fn).__name__}; expected a function (output, target) -> loss"
            )
        if loss_fn is None and target is not None:
            raise ArgumentError(
                "target without loss_fn: give loss_fn=..., or leave target out if the model returns its loss"
            )
        if not torch.is_grad_enabled():
            raise StateError(
                "forward_backward needs gradients, but is called under no_grad; call the pipe itself to evaluate"
            )
        if hooks := hooks_of(self.model):
            raise StateError(
                f"the model has the hook {hooks[0]!r}, which sees the output of mini-batches, and forward_backward "
                "makes none; remove it (hook.remove()), put it on a module inside, or call the pipe itself"
            )
        inside = self._fxpipe
        with inside.engine.running():
            assembly, leaves, batch = inside.assembly_for(args, kwargs)
            settings = inside.settings
            m = min(settings.chunks, batch)
            schedule = make_schedule(
                settings.schedule, len(settings.placement), m, settings.checkpoint, settings.placement
            )
            targets = () if target is None else (target,)
            loss, outputs = inside.engine.forward_backward(
                assembly, leaves, batch, schedule, loss_fn or _own_loss, targets, reduction, grad_scaler, return_outputs
            )
            return (loss, outputs) if return_outputs else loss

    # -- what it tells -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The stages, what they cost and what they send."""
        if self._fxpipe.plan is None:
            raise StateError(
                "the pipe has no plan yet: it plans at the first call; pass example_args to fxpipe.pipeline to plan at "
                "once"
            )
        return self._fxpipe.plan

    @property
    def model(self) -> nn.Module:
        """The model that was given."""
        model: nn.Module = self.__dict__["_model"]
        return model

    @property
    def last_step(self) -> StepRecord | None:
        """What the last step did, and when; None before the first.

            print(pipe.last_step)                                           # seconds and bytes by device, a timeline
            pipe.last_step.save_timeline("step.svg")                        # or .png, .pdf, .html, .json
            pipe.last_step.save_trace("step.json")                          # for chrome://tracing or ui.perfetto.dev

        Of a drop-in it has the forward and, once that has run, the backward. On GPUs times are taken from their
        streams; reading them here waits until the GPUs have nothing left to do, a step itself never does.
        """
        return self._fxpipe.engine.last_step

    def extra_repr(self) -> str:
        from fxpipe.pipe_text import pipe_lines

        return "\n".join(pipe_lines(type(self.model).__name__, self._fxpipe.settings, self._fxpipe.plan))

    def _repr_html_(self) -> str:
        from fxpipe.pipe_text import pipe_html

        return pipe_html(type(self.model).__name__, self._fxpipe.settings, self._fxpipe.plan)

    # -- its life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the workers. The model stays as it is; calling the pipe again is an error.

        A step that another thread runs meanwhile fails.
        """
        self._fxpipe.engine.driver.close()
        self._fxpipe.closed = True

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return Pipeline(copy.deepcopy(self.model, memo), self._fxpipe.asked, self._fxpipe.given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, (self.model, self._fxpipe.asked, self._fxpipe.given)

    # -- where it is the model ---------------------------------------------------------------------------------------

    @property
    def _fxpipe(self) -> Inside:
        inside: Inside = self.__dict__["_fxpipe"]
        return inside

    @property
    def training(self) -> bool:
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_parameters" in self.__dict__:  # not while nn.Module sets itself up
            self.model.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Pipeline:
        for tensor in _one_of_each_device(self.model):
            moved = fn(tensor.new_empty(0)).device
            if not has_values(tensor):
                continue  # it gets some
            if moved != tensor.device:
                raise StateError(
                    f"a pipe cannot be moved to {moved}: its devices are given to fxpipe.pipeline(model, "
                    "devices=[...]); casts of the dtype (.half(), .to(torch.bfloat16)) are fine"
                )
        self.model._apply(fn, recurse)
        self._fxpipe.graphs.clear()  # recorded with the old dtypes
        return self


def _one_of_each_device(model: nn.Module) -> Iterator[torch.Tensor]:
    found: dict[torch.device, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found.setdefault(tensor.device, tensor)
    yield from found.values()


def _own_loss(output: Any) -> Any:
    """Without a loss_fn the model's output is the loss."""
    return output
