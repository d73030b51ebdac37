"""`DistributedPipeline`: the module that `fxpipe.pipeline` returns on each rank of a process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxpipe._torch.module_internals import with_metadata
from fxpipe.distributed.held_tensors import GivenMemory
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.distributed.rank_state import EVALUATION, RankState, check_agreement, model_fields
from fxpipe.distributed.rank_stream import RankStreamLoop, RankTrainStream
from fxpipe.errors import ArgumentError, ArgumentTypeError, StateError
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.pipe.train_stream import TrainStream
from fxpipe.planning.options.pipeline_options import check_replicas, make_settings
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning.candidates import with_best_schedule
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.runtime.step_record import StepRecord
from fxpipe.scheduling import Action
from fxpipe.scheduling.streams import WeightPolicy
from fxpipe.tracing.record.module_hooks import user_hooks_of
from fxpipe.tracing.tensors import has_values
from fxpipe.utils.units import with_article

DEFAULT_TIMEOUT = 1800.0  # seconds, as of process groups

REFUSED_DROP_IN = (
    "pipe(x) with gradients on would have to go back through all processes when its loss does, and autograd's graph "
    "ends with the process. To train, write\n"
    "    loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)\n"
    "in place of loss_fn(pipe(x), target).backward(). To evaluate:\n"
    "    with torch.no_grad(): y = pipe(x)"
)


class DistributedPipeline(Pipeline):
    """The pipeline module of one rank. `fxpipe.pipeline(devices=mesh)` returns it.

    All ranks make the same calls. `parameters()`, `buffers()` and `state_dict()` cover the stages of this rank; a tied
    weight is on each rank that uses it. A model that has values stays complete in each process, so you can still call,
    copy or save it; on accelerators only this rank's part moves to the device. If the model was built on the meta
    device, the tensors of other ranks stay there, also in `model`, and later graphs (for evaluation, say) are recorded
    without values, so forward may not read values.

    With data parallelism, each row of a mesh is a replica of the pipe with a separate mini-batch in each step:

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "pipe"))
        pipe = fxpipe.pipeline(model, devices=mesh["pipe"], data_parallel=mesh["data"], chunks=8, example_args=(x,))
        loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)

    A step processes the *union* of these mini-batches: loss and gradients are the plain model's on the union, also if
    replicas have unequal numbers of samples, or of tokens if the loss is a pair (total, weight). If the loss needs all
    samples together, every replica computes it from the outputs and targets of all. Do not divide by the number of
    replicas. (If replicas have one micro-batch each, nothing detects a loss that is not a mean over samples.)
    Parameters and buffers start with the values of the first replica; buffers that a training step changes get its
    values on all. Random numbers equal the numbers of one process that trains on the union. Replicas evaluate alone.

    `forward_backward` works as in one process (`Pipeline.forward_backward`). Inputs are read on the rank of the first
    stage (`needs_inputs`), target and loss_fn on the rank of the last stage (`needs_target`); other ranks may pass
    None, or `micro_batches=()`. All ranks get the loss of all replicas. Each rank has a `grad_scaler`, created with
    equal arguments; if a gradient is infinite on one rank it is set to infinite on all, so all skip the update. If a
    step fails on one rank, all raise (`DistributedError` names the rank), and gradients and buffers are unchanged.

    `train_stream` gives the same bits as one process. All ranks iterate and get all losses; the
    `fxpipe.optim.StageOptimizer` of each updates its stage. The rank of the first stage reads the inputs of `batches`,
    the rank of the last stage the targets; others may pass `batches=()`. The stream ends for all ranks if the rank of
    the first stage leaves its loop. `with pipe.train_stream(...) as losses:` also reports an exception in its block to
    the other ranks. Mini-batch t is the union of the t-th mini-batches of all replicas, until a replica has no more.
    """

    __slots__ = ()
    _fxpipe: RankState

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output for a mini-batch, without gradients. Raises `StateError` if they are enabled.

        Inputs are read on the rank of the first stage (`needs_inputs`); other ranks may omit them or pass None. The
        rank of the last stage gets the output, the others None; with `outputs="all"` all ranks get it.
        """
        if torch.is_grad_enabled():
            raise StateError(REFUSED_DROP_IN)
        state = self._fxpipe
        state.check_open()
        with state.engine.running(), state.group.together():
            if hooks := user_hooks_of(self._fxpipe_model):
                raise StateError(
                    f"the model has the hook {hooks[0]!r}, which sees its inputs and outputs, and these are on "
                    "different processes; remove it (hook.remove()), or put it on a module inside"
                )
            inputs = state.agree(EVALUATION, [ModelCall(args, kwargs, ())])
            schedule = state.schedule_for(len(inputs.samples), "inference")
            return state.engine.call_ranks(inputs, schedule, to_all=state.outputs == "all")

    def _open_stream(
        self, batches: Iterable[Any], call: LossCall, optimizer: StagewiseOptimizer, policy: WeightPolicy
    ) -> TrainStream:
        replicas = self._fxpipe.engine.replicas
        if not replicas.is_synced:
            raise StateError(
                "train_stream within no_sync(): replicas would each be updated with gradients of their own; open the "
                "stream outside of it"
            )
        if replicas.has_unsynced and any(parameter.grad is not None for parameter in self.parameters()):
            raise StateError(
                "train_stream behind forward_backward within no_sync(): .grad has gradients that other replicas do not "
                "know of; sum them by a call of forward_backward outside of it and step, or call zero_grad(), before"
            )
        fields = {"vertical_sync": str(policy is WeightPolicy.VERTICAL_SYNC), "reduction": call.reduction}
        check_agreement(self._fxpipe.group, fields, is_long=False)
        return RankTrainStream(RankStreamLoop(self._fxpipe, batches, call, optimizer, policy))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps the gradients of `forward_backward` calls in this block on their replica, like DDP's `no_sync`.

            with pipe.no_sync():
                pipe.forward_backward(x1, target=t1, loss_fn=loss_fn)
            pipe.forward_backward(x2, target=t2, loss_fn=loss_fn)       # sums the gradients of both calls over replicas

        All replicas must use it for the same calls. Without data parallelism it has no effect.
        """
        replicas = self._fxpipe.engine.replicas
        before, replicas.is_synced = replicas.is_synced, False
        try:
            yield
        finally:
            replicas.is_synced = before

    @property
    def needs_inputs(self) -> bool:
        """Returns whether this rank's inputs are read: it has the first stage."""
        return self._fxpipe.group.rank == self._fxpipe.leader

    @property
    def needs_target(self) -> bool:
        """Returns whether this rank's target and loss_fn are used: it has the last stage."""
        return self._fxpipe.group.rank == self._fxpipe.last

    def gather_last_step(self) -> StepRecord | None:
        """Gathers the records of all ranks, which all call this. Times count from the step's start on each rank."""
        state = self._fxpipe
        state.check_open()
        with state.engine.running(), state.group.together() as connection:
            records = connection.all_gather(state.engine.last_step, "the records of the last step")
        known: list[StepRecord] = [record for record in records if record is not None]
        if not known:
            return None
        # The receiver records a transfer; bytes that an action sends are summed here.
        transfers, sent = tuple(transfer for record in known for transfer in record.transfers), Counter[Action]()
        for transfer in transfers:
            sent[transfer.maker] += int(transfer.bytes)
        actions = [replace(one, sent=sent[one.action]) for record in known for one in record.actions]
        actions.sort(key=lambda one: one.start)
        devices = tuple(
            replace(record.devices[d], sent=sum(one.sent for one in actions if one.device == d))
            for d, record in enumerate(known)
        )
        return replace(known[0], actions=tuple(actions), transfers=transfers, devices=devices)

    def _own(self) -> set[int]:
        return {id(tensor) for tensor in self._fxpipe.own_tensors().values()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        own = self._own()
        yield from (item for item in self._fxpipe_model.named_parameters(*args, **kwargs) if id(item[1]) in own)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        own = self._own()
        yield from (item for item in self._fxpipe_model.named_buffers(*args, **kwargs) if id(item[1]) in own)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's part of the state, under the model's keys; `torch.distributed.checkpoint` saves it."""
        own, state = self._own(), self._fxpipe
        keep = kwargs.pop("keep_vars", False)
        full = self._fxpipe_model.state_dict(*args, keep_vars=True, **kwargs)
        # A value that is not a tensor of the model (the extra state of a module) goes to the first stage.
        known = {id(tensor) for tensor in (*self._fxpipe_model.parameters(), *self._fxpipe_model.buffers())}
        for key in [*full]:
            value = full[key]
            is_own = id(value) in own if id(value) in known else state.group.rank == state.leader
            if not is_own:
                del full[key]
            elif isinstance(value, torch.Tensor) and not keep:
                full[key] = value.detach()
        return full

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's part of `state_dict`, which may have the full model; allocates tensors without values."""
        own = self.state_dict(keep_vars=True)
        values = [(tensor, state_dict.get(key)) for key, tensor in own.items() if isinstance(tensor, torch.Tensor)]
        fitting = [t for t, new in values if isinstance(new, torch.Tensor) and has_values(new) and new.shape == t.shape]
        GivenMemory(fitting, lambda tensor: self._fxpipe.group.device)
        whole = {*self._fxpipe_model.state_dict()}
        entries = {key: value for key, value in state_dict.items() if key in own}
        keys = self._fxpipe_model.load_state_dict(with_metadata(entries, state_dict), strict=False, assign=assign)
        missing = [key for key in keys.missing_keys if key in own]
        unexpected = [key for key in state_dict if key not in whole]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for rank {self._fxpipe.group.rank}: "
                f"missing keys {missing}, unexpected keys {unexpected}"
            )
        return type(keys)(missing, unexpected)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Raises `StateError`: missing values would stay unnoticed, and tied tensors would no longer be tied."""
        raise StateError(
            "a pipe over processes gives memory to its parameters together with values: call "
            "fxpipe.distributed.load(pipe, path), or fxpipe.distributed.initialize(pipe), on all ranks"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Pipeline:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            """Casts the dtype of tensors on other ranks too, so that graphs stay the same on all ranks."""
            return fn(tensor) if has_values(tensor) else tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        return super()._apply(cast, recurse)

    def close(self) -> None:
        """Closes the connections to the other ranks; the model is unchanged. Each rank calls it."""
        super().close()
        self._fxpipe.group.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        raise StateError("a pipe over processes cannot be copied or pickled: save its state_dict(), or make another")

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__deepcopy__({})  # type: ignore[return-value]


def distributed_state(pipe: object) -> RankState:
    """Returns the state of a pipe over processes. Raises `ArgumentTypeError` if `pipe` is not one."""
    if not isinstance(pipe, DistributedPipeline):
        raise ArgumentTypeError(
            f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline(model, devices=mesh, ...) returns on the "
            "ranks of a mesh or process group. A model or a pipe in one process is loaded with load_state_dict"
        )
    pipe._fxpipe.check_open()
    return pipe._fxpipe


def pipeline_over_ranks(
    model: nn.Module,
    devices: DeviceMesh | dist.ProcessGroup,
    options: Mapping[str, Any],
    plan: Plan | None,
    outputs: str,
    timeout: float,
    data_parallel: DeviceMesh | dist.ProcessGroup | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> DistributedPipeline:
    """Creates the pipe of this rank. All ranks call it together."""
    group = RankGroup(devices, timeout, data_parallel)
    with group.together():
        if outputs not in ("last", "all"):
            raise ArgumentError(f"outputs={outputs!r} is unknown; accepted are 'last' and 'all'")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ArgumentError(
                "model is a DistributedDataParallel, which sums gradients by itself: give model.module, and the ranks "
                "of its replicas as data_parallel="
            )
        if name := next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None):
            raise ArgumentError(
                f"the parameter {name!r} is a DTensor, as after fully_shard or parallelize_module, and a stage "
                "computes with whole parameters: give the model as it was before; data_parallel= has it on several "
                "replicas, and torch.distributed.optim.ZeroRedundancyOptimizer shards the optimizer's state over them"
            )
        settings = make_settings({**options, "devices": [str(group.device)] * group.size}, plan)
        settings = replace(settings, processes=True, ranks_per_stage=group.replica_count)
        if plan is not None:
            check_replicas(plan, group.replica_count)
            settings = with_best_schedule(plan, settings) if settings.left else settings
        check_agreement(group, model_fields(model, settings))
        state = RankState(model, settings, plan, group)
        state.outputs = outputs
        pipe = DistributedPipeline(model, settings, state=state)
        state.record_first(args, kwargs)
    return pipe


def clip_grad_norm_(
    pipe: Pipeline, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clips the gradients of a model by their norm over all ranks. All ranks call it.

        loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        fxpipe.distributed.clip_grad_norm_(pipe, 1.0)
        optimizer.step()

    The norm equals `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` on the plain model: over the parameters of
    all stages, with tied weights counted once. For a pipe in one process, it calls that function.

    Args:
        max_norm: the largest norm of the gradients after scaling.
        norm_type: order of the norm; `inf` for the largest element.
        error_if_nonfinite: raise on all ranks if the norm is NaN or infinite.

    Returns:
        The norm before clipping, on all ranks.

    Raises:
        StateError: gradients are not summed over replicas yet, after calls within `no_sync()`.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentTypeError(f"pipe is {with_article(pipe)}; expected what fxpipe.pipeline returns")
    if not isinstance(pipe, DistributedPipeline):
        return torch.nn.utils.clip_grad_norm_(pipe.parameters(), max_norm, norm_type, error_if_nonfinite)
    state = distributed_state(pipe)
    with state.engine.running(), state.group.together() as connection, torch.no_grad():
        if state.engine.replicas.has_unsynced:
            raise StateError(
                "the gradients are those of one replica, from calls of forward_backward within no_sync(): clip behind "
                "the call that sums them over the replicas"
            )
        # By the names in the model, so that a tied weight on several ranks counts once.
        names = {id(parameter): name for name, parameter in pipe._fxpipe_model.named_parameters()}
        gradients = {names[id(p)]: p.grad for p in pipe.parameters() if p.grad is not None}
        own = {name: torch.linalg.vector_norm(g, norm_type).cpu() for name, g in gradients.items()}
        everybody = connection.all_gather(own, "the norms of gradients")
    norms = {name: norm for of_rank in everybody for name, norm in of_rank.items()}
    ordered = [norms[name] for name in names.values() if name in norms]
    total = torch.nn.utils.get_total_norm(ordered, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all ranks is {float(total)}, so that they cannot be "
            "clipped; error_if_nonfinite=False scales them all the same"
        )
    total = total.to(state.group.device)
    torch.nn.utils.clip_grads_with_norm_(pipe.parameters(), max_norm, total)
    return total
