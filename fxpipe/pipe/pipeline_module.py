"""`fxpipe.Pipeline`: the module that `fxpipe.pipeline` returns."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn

from fxpipe._torch.module_internals import STORE_NAMES, is_in_data_parallel_forward
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.model_calls import ModelCall, check_iterable
from fxpipe.pipe.pipeline_class import NOT_COMPILED, SLOTS, pipeline_class, set_up
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.pipe.train_stream import StreamLoop, TrainStream, stream_policy
from fxpipe.planning.options.parse import DROP_IN_SCHEDULE, parse_compile, parse_switch
from fxpipe.planning.options.pipeline_options import OPTION_DEFAULTS, Settings
from fxpipe.planning.plans import Plan
from fxpipe.runtime import losses
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.runtime.step_record import StepRecord
from fxpipe.scheduling.streams import WeightPolicy
from fxpipe.tracing.record.module_hooks import run_with_user_hooks, user_hooks_of
from fxpipe.tracing.source_lines import code_of_function, line_of_function
from fxpipe.tracing.tensors import has_values
from fxpipe.utils.python_objects import class_of_model
from fxpipe.utils.units import count_text, human_bytes, human_seconds, with_article

# The summary of a pipe that `print` shows before the model: devices, schedule and stages.

MAX_PRINTED_STAGES = 8
DROP_IN_LINE = "the schedule is that of forward_backward; pipe(x) and its backward, as in trainers, run as gpipe"


def pipeline_lines(model: str, settings: Settings, plan: Plan | None) -> list[str]:
    """Returns the summary of a pipe, line by line. `model`: the name of its class."""
    workers, stages = settings.workers, len(settings.placement)
    shared = f"in {stages} stages " if stages > len(workers) else ""
    devices = ", ".join(map(str, settings.row_devices))
    chunks = count_text(settings.chunks, "micro-batch", "es")
    head = f"{model} {shared}on [{devices}], {chunks}, schedule {schedule_name(settings)}"
    heads = [head] if settings.processes or settings.schedule == DROP_IN_SCHEDULE else [head, DROP_IN_LINE]
    if plan is None:
        return [*heads, "no plan yet: it plans at the first call"]
    from fxpipe.inspect.stage_graph import node_groups_of

    stage_lines = []
    for stage in plan.stages:
        groups = node_groups_of(stage, 1, 0.0)  # its first and its last module
        stage_lines.append(
            f"stage {stage.index} on {stage.device}: {groups[0].name if groups else 'nothing'}, "
            f"{count_text(len(stage.nodes), 'node')}, {human_bytes(stage.parameter_bytes)}, "
            f"{human_seconds(stage.forward_seconds)} + {human_seconds(stage.backward_seconds)}"
        )
    if len(stage_lines) > MAX_PRINTED_STAGES:
        left_out = len(stage_lines) - MAX_PRINTED_STAGES
        stage_lines[MAX_PRINTED_STAGES - 1 : -1] = [
            f"... {count_text(left_out, 'more stage')}, as print(pipe.plan) shows"
        ]
    return [*heads, *stage_lines]


def schedule_name(settings: Settings) -> str:
    """Returns the name of the schedule, which may also be a text, a `Schedule` or a function of the user."""
    schedule = settings.schedule
    if isinstance(schedule, str):
        return schedule
    return str(getattr(schedule, "name", None) or getattr(schedule, "__name__", "custom"))


def passed_by_text(forward: Callable[..., Any]) -> str:
    """Returns the warning that a function that replaced a pipe's `forward` has not run the pipeline."""
    code = code_of_function(forward)
    name = type(forward).__qualname__ if code is None else code.co_qualname
    return (
        f"{name} ({line_of_function(forward)}), which was put in the place of the pipe's forward, has not run the "
        "pipeline: what it calls of the model runs as without one. Replace forward of the model first, and give that "
        "to fxpipe.pipeline; or let the new forward call the old one. A trainer that replaces it, as those of TRL do, "
        "gets the model, and then the pipe: trainer.model = trainer.model_wrapped = fxpipe.pipeline(trainer.model, ...)"
    )


READABLE_OPTIONS: dict[str, Callable[[Settings], Any]] = {  # unless the model has such an attribute
    "chunks": lambda settings: settings.chunks,
    "devices": lambda settings: list(settings.row_devices),
    "schedule": schedule_name,
    "checkpoint": lambda settings: settings.checkpoint,
}


class Pipeline(nn.Module):
    """A model that runs as a pipeline. Made by `fxpipe.pipeline`.

    The pipe is an instance of the model's class (`fxpipe.pipe.pipeline_class`): attributes, properties, methods, items
    and `isinstance` work as for the model, and methods that call the model call the pipe. `fxpipe.unwrap(pipe)` returns
    the model without the pipeline.
    """

    __slots__ = ()
    _fxpipe: PipelineState
    _fxpipe_model: nn.Module
    _fxpipe_call: dict[str, Any]

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind = class_of_model(cls)
        if kind is None:
            return object.__new__(pipeline_class(cls, type(model)))
        # A method of the model's class creates another model: `pipe[:2]`, `pipe.from_pretrained(...)`.
        return kind(*args, **kwargs) if model is None else kind(model, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hides classes of pipes from the model's class, which may register or check its subclasses."""

    def __init__(
        self, model: nn.Module, settings: Settings, plan: Plan | None = None, state: PipelineState | None = None
    ):
        if not isinstance(settings, Settings):
            raise ArgumentTypeError("fxpipe.Pipeline is the class of pipes; call fxpipe.pipeline(model, devices)")
        set_up(self, model)
        object.__setattr__(self, "_fxpipe", state or PipelineState(model, settings, plan))

    @torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, engine = self._fxpipe_call.get("forward"), self._fxpipe.engine  # None: not replaced
        if forward is None:
            return nn.Module.__call__(self, *args, **kwargs)  # the graph includes a `__call__` of the model's class
        starts = engine.starts
        try:
            result = nn.Module.__call__(self, *args, **kwargs)
        except RuntimeError as error:  # for example: tensors of two stages are on two devices
            if engine.starts == starts:
                error.add_note(f"fxpipe: {passed_by_text(forward)}")
            raise
        if engine.starts == starts:
            self._fxpipe.warn_once("replaced forward", passed_by_text(forward))
        return result

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output for a mini-batch, which runs through the stages in micro-batches.

        The backward of the output runs once. A loss that the model computes itself is the loss of the mini-batch, even
        if micro-batches differ in the number of tokens that count: the graph shows the sum and the divisor. The graph
        of an opaque module does not. Then such a batch raises a LossError, and so does any batch without gradients;
        pass `out_dims={"loss": "sum"}` if the loss is a sum.
        """
        if not user_hooks_of(self._fxpipe_model):
            return self._run(*args, **kwargs)
        return run_with_user_hooks(self._fxpipe_model, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._fxpipe
        with inside.engine.running():
            given_inputs = inside.find([ModelCall(args, kwargs, ())], in_one=False)
            grad, count = given_inputs.bound.state.grad, len(given_inputs.samples)
            if grad:
                inside.warn_of_drop_in_memory(given_inputs)
            return inside.engine.call(
                given_inputs, inside.schedule_for(count, DROP_IN_SCHEDULE if grad else "inference")
            )

    @overload
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        micro_batches: Iterable[Any] | None = None,
        optimizer: StagewiseOptimizer | None = None,
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
        micro_batches: Iterable[Any] | None = None,
        optimizer: StagewiseOptimizer | None = None,
        return_outputs: Literal[True],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]: ...

    @torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]  # the overloads are typed
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        micro_batches: Iterable[Any] | None = None,
        optimizer: StagewiseOptimizer | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Runs forward and backward of a mini-batch, interleaved by the schedule; adds the gradients to `.grad`.

            loss = pipe.forward_backward(x, target=t, loss_fn=torch.nn.functional.cross_entropy)

        The gradients are the gradients of `loss_fn(model(x), target)` on the whole mini-batch of b samples, even if its
        micro-batches differ in size. If the loss is not a mean over samples, but for example over tokens without
        padding, return the sum and the count:

            def loss_fn(logits, t):  # (b, classes, length), (b, length)
                return F.cross_entropy(logits, t, reduction="sum"), (t != -100).sum()

        `loss_fn` is called for each micro-batch. To verify the loss, the 1st, 10th, 100th, ... step also calls it with
        all gathered outputs, and compares values and gradients; such a step holds all outputs of the mini-batch. A loss
        with other values, or a mini-batch of another size, is another loss. These steps, and on the CPU every step,
        also check that each element of the sums and means at the end of the loss has the same weight in all
        micro-batches, and that no micro-batch alone has a loss of 0 or NaN: this detects padding. A loss may draw
        random numbers from torch's generators; if they change its value, it is not compared.

        A loss that needs all samples together is called once, with the output of the mini-batch, between the last
        forward and the first backward: if you say so (`reduction="batch"`: contrastive losses, Dice), or if the model
        computes more than sums from all samples (similarities, the loss of a router). Such a step runs in the order of
        GPipe, and holds all outputs of the mini-batch.

        Instead of a mini-batch you can pass micro-batches, any number of any sizes:

            loss = pipe.forward_backward(micro_batches=itertools.islice(data, 8), loss_fn=loss_fn)

        Each runs as a mini-batch of its own and may have its own length. The loss is the mean over the losses of
        micro-batches, weighted by samples (the sum, with `reduction="sum"`), as in a loop that accumulates gradients.
        If samples interact (a contrastive loss), or no input has a batch dimension, all micro-batches have the same
        weight. For a mean over tokens return a pair (total, weight).

        Args:
            args, kwargs: the model's inputs. (Pass an input named like an argument here by position.)
            target: a tensor, or tensors in tuples, lists, dicts and dataclasses, with the b samples in dimension 0;
                None: loss_fn takes the output alone.
            loss_fn: (output, target) -> a 0-dim floating point tensor; or a pair (total, weight), of such a tensor and
                a number or 0-dim tensor without gradient: the loss is the sum of totals over the sum of weights. It
                may be a module; leaves that it uses get gradients. None: the model's output is the loss. If the loss is
                inside the output: `lambda out: out.loss`; each micro-batch then returns its share of the loss.
            reduction: "mean": the loss is a mean over samples. "sum": it is a sum. Not used for pairs. "batch": loss_fn
                needs all samples together, and is called once, with the output of the mini-batch (contrastive, Dice).
            grad_scaler: scales the loss for backward, as `grad_scaler.scale(loss).backward()` does; then call
                `grad_scaler.step(optimizer)` and `grad_scaler.update()` as usual.
            micro_batches: an iterable of micro-batches instead of inputs and target. Each is (args, kwargs, target),
                with a tuple, a dict, and the target or None; or (inputs, target), with inputs a tensor, a tuple or a
                dict; or a tensor or dict of inputs alone. All have a target, or none. It is read to its end before a
                stage runs.
            optimizer: a `fxpipe.optim.StageOptimizer` of this pipe. It steps with the accumulated gradients, as
                `optimizer.step(); optimizer.zero_grad()`. With `overlap=True` each stage is updated while others run.
            return_outputs: return (loss, outputs). Otherwise an output is freed with its micro-batch.

        Returns:
            The loss of the mini-batch: 0-dim, detached, unscaled, on the last stage's device. With `return_outputs` the
            pair (loss, outputs): the detached output of the mini-batch, or for `micro_batches` a list of outputs.

        Raises:
            LossError: the loss is not a scalar, does not require grad, or is not what the losses of micro-batches add
                up to. After this, as after any exception, gradients and buffers are unchanged.
            ArgumentError: target and inputs differ in batch size, the inputs cannot be split, or micro_batches cannot
                be read.
            StateError: gradients are off, the pipe is closed, or another step is running.

        Source: forward and backward interleaved without stale weights is PipeDream-Flush, Narayanan et al.,
        Memory-Efficient Pipeline-Parallel DNN Training, 2021, https://arxiv.org/abs/2006.09503. There, all
        micro-batches have the same weight.
        """
        inside, is_handed_over = self._fxpipe, micro_batches is not None
        with inside.checking():
            losses.refuse_inputs_by_name(self._fxpipe_model.forward, target, loss_fn, reduction)
            losses.check_reduction(reduction)
            losses.check_scaler(grad_scaler)
            parse_switch("return_outputs", return_outputs)
            calls: list[ModelCall] | None = [ModelCall(args, kwargs, () if target is None else (target,))]
            if is_handed_over:
                if args or kwargs or target is not None:
                    raise ArgumentError(
                        "micro_batches and inputs or a target beside them: these are in the micro-batches"
                    )
                if reduction == "batch":
                    raise ArgumentError(
                        "reduction='batch' with micro_batches: each is a mini-batch of its own, with an output of its "
                        "own; give one mini-batch: forward_backward(x, target=t, ...)"
                    )
                calls = inside.read_micro_batches(micro_batches)
            losses.check_loss_function(loss_fn, (calls[0].target or None) if calls else None)
            check_can_train(self._fxpipe_model)
            check_optimizer(optimizer, self, grad_scaler)
            call = losses.LossCall(loss_fn or losses.model_loss, reduction, grad_scaler, return_outputs)
            try:
                with inside.running():
                    loss, outputs, has_stepped = inside.train(calls, is_handed_over, call, optimizer)
            except TypeError as error:
                if loss_fn is not None and target is None and not is_handed_over:
                    error.add_note(
                        "fxpipe: positional arguments are inputs of the model, and without target= loss_fn gets the "
                        "output alone; did you mean pipe.forward_backward(x, target=y, loss_fn=...)?"
                    )
                raise
        if optimizer is not None and has_stepped:
            optimizer.count_step()
        elif optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return (loss, outputs) if return_outputs else loss

    @torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
    def train_stream(
        self,
        batches: Iterable[Any],
        *,
        optimizer: StagewiseOptimizer,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str = "mean",
        vertical_sync: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> TrainStream:
        """Trains on a stream of mini-batches, without a flush between them; yields their losses.

            pipe = fxpipe.pipeline(model, devices, schedule="pipedream")
            optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
            for loss in pipe.train_stream(loader, optimizer=optimizer, loss_fn=torch.nn.functional.cross_entropy):
                print(loss)

        A stage updates its weights as soon as it has run the backward of a mini-batch, and then starts another one. So
        no stage idles, and weights are stale: at stage j of n a mini-batch uses the weights of n - 1 - j updates ago.
        Its backward uses the weights of its forward (*weight stashing*).

        | schedule                           | weights of mini-batch t at stage j      | versions at stage j   |
        |------------------------------------|-----------------------------------------|-----------------------|
        | `pipedream`                        | of the first t - (n - 1 - j)            | n - j                 |
        | `pipedream`, `vertical_sync=True`  | of the first t - (n - 1), at all stages | n                     |
        | `pipedream_2bw`                    | of the first t - 1, at all stages       | 2                     |

        With `pipedream` a mini-batch is not split (`chunks=1`, unless you pass chunks). With `pipedream_2bw` it runs in
        `chunks` micro-batches, at least one for each stage, and their gradients make one update. With one stage on one
        device all of them are plain training. If the loss needs all samples together, the last stage runs all forwards
        of a mini-batch before its backwards, and versions are as in the table with any `chunks`.

        If a stage has R replicas (a plan of `balance="pipedream"` with `hardware`), mini-batch t runs on replica t
        modulo R, and each *round* of R mini-batches makes one update of all replicas, with the mean of the gradients. A
        mini-batch of round k = floor(t / R) uses the weights of the first k - W / R updates, where W mini-batches are
        in flight in all replicas of the stage; the stage holds 1 + W / R versions. If the stream ends within a round,
        the update uses the mean of the mini-batches so far. With `vertical_sync` all stages have the rounds of the
        stage with most replicas. With `pipedream_2bw`, or `chunks` of at least R, each mini-batch is a round, and
        replicas take its micro-batches in turn. If forward changes buffers, replicas run their forwards one after
        another.

        Mini-batches are read ahead: n + 2 of them are in flight or wait; with replicas, rounded up to a whole round.
        A change of an optimizer option in the loop, such as the learning rate, applies to mini-batches read after it; a
        round uses the options of its last mini-batch. While a stream is open you cannot call the pipe and must not
        write to the weights. When the stream has ended or was closed, all mini-batches read are applied on all stages;
        then evaluate, save, load, or open the next one. (A mini-batch of another shape, which needs another graph,
        waits until earlier ones have ended.) `with pipe.train_stream(...) as losses:` closes it; so does leaving a
        loop, when the last reference to the stream is deleted.

        If reading a mini-batch raises, the losses of earlier ones are yielded first, then the exception is raised. If a
        stage raises, the exception is raised immediately, mini-batches in flight are dropped, and a note reports the
        number of updates of each stage. Buffers keep the values of the last forward.

        The gradients of all stages never exist at the same time: clipping by the global norm, `GradScaler` and
        optimizer hooks need `forward_backward`. Reading `.grad` of a parameter in the loop raises a StateError;
        `optimizer.zero_grad()` has no effect there. Several stages cannot use one weight.

        Args:
            batches: an iterable of mini-batches, each as a micro-batch of `forward_backward`: (inputs, target),
                (args, kwargs, target), or inputs alone.
            optimizer: a `fxpipe.optim.StageOptimizer` of this pipe, with or without `overlap`.
            loss_fn, reduction: as for `forward_backward`.
            vertical_sync: all stages use the version that was the newest at the first stage.
            grad_scaler: refused.

        Returns:
            An iterator over the losses, in order, with `close()`, `applied` and `versions_held`. At its end
            `pipe.last_step` is the record of the last 32 mini-batches.

        Raises:
            ArgumentError: the pipe has another schedule, or an argument cannot be used.
            StateError: several stages use a weight, the optimizer has hooks, or another step is running.

        Sources: see `fxpipe.scheduling.streams`.
        """
        inside = self._fxpipe
        with inside.checking():
            losses.check_reduction(reduction)
            parse_switch("vertical_sync", vertical_sync)
            policy = stream_policy(inside.settings.schedule, vertical_sync)
            losses.check_scaler(grad_scaler)
            if grad_scaler is not None:
                raise ArgumentError(
                    "grad_scaler in a stream: a scaler looks at the gradients of all stages before any is updated, and "
                    "there is no such time; train in bfloat16, or with forward_backward"
                )
            losses.check_loss_function(loss_fn, None)
            check_can_train(self._fxpipe_model, "train_stream")
            if not isinstance(optimizer, StagewiseOptimizer):
                raise ArgumentTypeError(
                    f"optimizer is {with_article(optimizer)}; expected a fxpipe.optim.StageOptimizer of this pipe, "
                    "which steps each stage by itself: fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=...)"
                )
            check_optimizer(optimizer, self, None)
            optimizer.begin_updates(in_stream=True)
            inside.check_open()
            call = losses.LossCall(loss_fn or losses.model_loss, reduction)
            check_iterable("batches", batches)
            return self._open_stream(batches, call, optimizer, policy)

    def _open_stream(
        self, batches: Iterable[Any], call: losses.LossCall, optimizer: StagewiseOptimizer, policy: WeightPolicy
    ) -> TrainStream:
        return TrainStream(StreamLoop(self._fxpipe, batches, call, optimizer, policy))

    def compile(self, **options: Any) -> None:
        """Compiles the stages from the next step on, each in its worker: the `compile=` of `fxpipe.pipeline`.

        Args:
            options: keywords of `torch.compile`.

        Raises:
            ArgumentError: torch.compile has no such keyword, or a stage cannot use it.
        """
        inside = self._fxpipe
        with inside.engine.running():
            compiling = parse_compile(options or True)
            inside.settings, inside.asked = (replace(one, compile=compiling) for one in (inside.settings, inside.asked))
            if inside.first is not None:
                inside.first = replace(inside.first, settings=inside.settings)
            inside.graphs.clear()  # recorded again when they are needed next

    @property
    def plan(self) -> Plan:
        """The stages, their costs and transfers; in terms of dynamic sizes, if a graph with these was recorded."""
        plan = self._fxpipe.plan_of_all_sizes()
        if plan is None:
            raise StateError(
                "the pipe has no plan yet: it plans at the first call; pass example_args to fxpipe.pipeline to plan at "
                "once"
            )
        return plan

    @property
    def model(self) -> Any:
        """The model. If it has a child or an attribute `model`, this is returned instead."""
        own = self.__dict__
        for names in (own, *(own[store] for store in STORE_NAMES)):
            if "model" in names:
                return names["model"]
        return self._fxpipe_model

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step: its actions and their times; None before the first step.

            print(pipe.last_step)                                           # seconds and bytes by device, a timeline
            pipe.last_step.save_timeline("step.svg")                        # or .json for Perfetto
            pipe.last_step.save_trace("step.json")                          # for chrome://tracing or ui.perfetto.dev

        For a drop-in it includes the forward and, after it has run, the backward. GPU times are taken on the streams:
        reading them here synchronizes with the GPUs, a step itself does not.

        `metrics()` returns the numbers by name, for loggers. For devices that measure memory, such as CUDA, it has the
        planned peak and the actual one: the largest between the last reset (`torch.cuda.reset_peak_memory_stats`, or by
        planning) and the first read of the record.
        """
        return self._fxpipe.last_step()

    def __repr__(self) -> str:
        # The class has the model's name, which trainers use; the printed text shows a pipe.
        kind = type(self).__mro__[1].__name__
        return kind + nn.Module.__repr__(self).removeprefix(self._get_name())

    def extra_repr(self) -> str:
        return "\n".join(pipeline_lines(type(self._fxpipe_model).__name__, self._fxpipe.settings, self._fxpipe.plan))

    def _repr_html_(self) -> str:
        from fxpipe.inspect.plan_text import plan_html
        from fxpipe.inspect.svg import notebook_note, notebook_view

        plan = self._fxpipe.plan
        first, *rest = pipeline_lines(type(self._fxpipe_model).__name__, self._fxpipe.settings, plan)
        if plan is None:
            return notebook_view("Pipeline", first, *map(notebook_note, rest))
        return notebook_view("Pipeline", first) + plan_html(plan)

    def close(self) -> None:
        """Stops the workers. The model stays as it is; calling the pipe again raises an error.

        A step that another thread runs at that time fails. An exception of a stream whose loop you left (`break`) is
        raised here, unless an earlier call has raised it.
        """
        self._fxpipe.engine.executor.close()
        self._fxpipe.closed = True
        self._fxpipe.optimizer_states.close()
        self._fxpipe.engine.raise_kept_failure()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        copied = Pipeline(copy.deepcopy(self._fxpipe_model, memo), self._fxpipe.asked, self._fxpipe.given_plan)
        copied._fxpipe.checks_evaluation = self._fxpipe.checks_evaluation
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()  # the model's class may define one

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, (self._fxpipe_model, self._fxpipe.asked, self._fxpipe.given_plan)

    def __getattr__(self, name: str) -> Any:
        if name in SLOTS:  # before `set_up`
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(type(self._fxpipe_model), name):  # its class has changed: parametrized
                return getattr(self._fxpipe_model, name)
            if name in READABLE_OPTIONS:
                return READABLE_OPTIONS[name](self._fxpipe.settings)
            if name == "hf_device_map" and len(devices := self._fxpipe.accelerators()) > 1:
                return {f"device {index}": device for index, device in enumerate(devices)}  # as Hugging Face expects
            raise

    def __dir__(self) -> list[str]:
        names = {*super().__dir__(), *dir(type(self)), *READABLE_OPTIONS}  # `__class__` is the model's
        return sorted(name for name in names if not name.startswith("_fxpipe"))

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_option_as_attribute(self._fxpipe_model, name, value)
        if hasattr(type(self._fxpipe_model), name) and not hasattr(type(self), name):
            setattr(self._fxpipe_model, name, value)
        else:
            super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script calls it
        raise StateError(
            "a pipe cannot be scripted by torch.jit, which compiles no worker threads; script the model: "
            "fxpipe.unwrap(pipe)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxpipe_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxpipe_model.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Pipeline:
        own, tensors = self._fxpipe.accelerators(), (*self._fxpipe_model.parameters(), *self._fxpipe_model.buffers())
        moves = {tensor.device: fn(tensor.new_empty(0)).device for tensor in tensors if has_values(tensor)}
        for place, target in moves.items():
            if target != place and (target in own or (target.type == "cpu" and place in own)):  # as trainers do
                self._fxpipe.keep_on_stages(target)

                def stay(tensor: torch.Tensor) -> torch.Tensor:  # changes the dtype of a tensor with values only
                    return tensor.to(fn(tensor.new_empty(0)).dtype) if has_values(tensor) else fn(tensor)

                return self._apply(stay, recurse) if any(stay(tensor) is not tensor for tensor in tensors) else self
            if target != place:
                raise StateError(
                    f"a pipe cannot be moved to {target}: its devices are given to fxpipe.pipeline(model, "
                    "devices=[...]); casts of the dtype (.half(), .to(torch.bfloat16)) are fine"
                )
        self._fxpipe_model._apply(fn, recurse)
        self._fxpipe.graphs.clear()  # recorded with the old dtypes
        return self


def unwrap(model: nn.Module) -> Any:
    """Returns the model that a pipe runs, without the pipeline; any other module unchanged.

    Both share all parameters and buffers. `pipe.model` is the same, unless the model has such a child or attribute.
    """
    return model._fxpipe_model if isinstance(model, Pipeline) else model


def refuse_option_as_attribute(model: nn.Module, name: str, value: Any) -> None:
    """Raises `StateError` if an option of a pipe is set as an attribute, which would have no effect."""
    if name not in OPTION_DEFAULTS or isinstance(value, (nn.Module, torch.Tensor)):
        return
    if name != "compile" and hasattr(model, name):
        return
    shown = reprlib.repr(value)
    beside = "plan=pipe.plan" if name in ("chunks", "devices", "checkpoint") else "devices"
    remedy = f"pipe = fxpipe.pipeline(fxpipe.unwrap(pipe), {beside}, {name}={shown})"
    if name in ("loss_fn", "target"):
        remedy = f"pipe.forward_backward(x, target=target, loss_fn=loss_fn), or, to plan with it, {remedy}"
    if name == "compile":
        remedy = f"pipe.compile(), or {remedy}"
    raise StateError(
        f"pipe.{name} = {shown}: {name} is an option of fxpipe.pipeline, and a pipe that is made keeps its "
        f"options. Write {remedy}. An attribute of the model of that name is set on the model: "
        f"fxpipe.unwrap(pipe).{name} = ..."
    )


def check_optimizer(optimizer: Any, pipe: Pipeline, grad_scaler: torch.amp.GradScaler | None) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, StagewiseOptimizer):
        raise ArgumentTypeError(
            f"optimizer is {with_article(optimizer)}; expected a fxpipe.optim.StageOptimizer. Any other one steps "
            "behind forward_backward: optimizer.step(); optimizer.zero_grad()"
        )
    if optimizer.pipe is not pipe:
        raise ArgumentError("optimizer is of another pipe, whose parameters this step has no gradients for")
    if grad_scaler is not None:
        raise ArgumentError(
            "optimizer and grad_scaler: a scaler looks at the gradients of all stages before any is updated; leave "
            "optimizer out, and call grad_scaler.step(optimizer), grad_scaler.update() and optimizer.zero_grad()"
        )


def check_can_train(model: nn.Module, what: str = "forward_backward") -> None:
    if not torch.is_grad_enabled():
        raise StateError(f"{what} needs gradients, but is called under no_grad; call the pipe itself to evaluate")
    if is_in_data_parallel_forward():
        raise StateError(
            f"{what} runs backward inside forward of a DistributedDataParallel, which sums gradients of a backward "
            "behind it only: those of the replicas would not be summed. Call the pipe there and its loss.backward() "
            "outside, or make the replicas by data_parallel= (fxpipe.pipeline)"
        )
    if hooks := user_hooks_of(model):
        raise StateError(
            f"the model has the hook {hooks[0]!r}, which sees the output of mini-batches, and {what} "
            "makes none; remove it (hook.remove()), put it on a module inside, or call the pipe itself"
        )
