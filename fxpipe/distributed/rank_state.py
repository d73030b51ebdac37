"""The programs of a pipe over processes: one rank looks them up, and all ranks record them together.

The rank of the first stage, the *leader*, reads the inputs of a step and sends the others a job: which graphs run, and
the number of samples; or, if a graph is missing, the inputs to record it with. Rank 0 alone makes the first plan, since
measured times differ between ranks. Model, settings, versions, graph and plan are compared between ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import nn

from fxpipe._torch.module_internals import all_modules
from fxpipe._torch.thread_state import ThreadState
from fxpipe.distributed.failures import rank_names
from fxpipe.distributed.held_tensors import HeldTensors, RankProgram
from fxpipe.distributed.rank_engine import RankEngine, RankInputs
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import ArgumentError, StateError
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.pipe.programs import MAX_GRAPHS, CachedGraph, MissingGraph
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph
from fxpipe.planning.plans import Plan
from fxpipe.rewriting.relay_routes import relay_routes
from fxpipe.runtime.bound_program import BoundProgram, ModelTensors
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.scheduling import Schedule
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.model_state import container_tensors, slots_of
from fxpipe.tracing.tensors import has_values
from fxpipe.tracing.traced import Traced
from fxpipe.utils.accelerator import draw_seed, peek_seed
from fxpipe.utils.batch_split import samples_per_micro_batch
from fxpipe.utils.pytree import flatten, map_tensor_leaves
from fxpipe.utils.units import names_text

EVALUATION, TRAINING, STREAM = "the pipe", "forward_backward", "train_stream"
BATCH_TRAINING = "forward_backward with reduction='batch'"
DECIDED = ("placement", "chunks", "checkpoint", "schedule")  # settings of rank 0 that all ranks use

Fields = Mapping[str, str]
LONGEST_SHOWN = 120
COMPARED_SETTINGS = (
    *("placement", "chunks", "schedule", "checkpoint", "balance", "pins", "check", "in_dims", "out_dims"),
    *("dynamic_shapes", "leaf_modules", "deferred_batch_norm", "compile"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """The message of the leader to the other ranks that describes a step."""

    call: str  # the method; all ranks must call the same
    mode: str  # digest of the modes of modules and thread
    seed: int  # seeds the step, or the random numbers that forward draws while it is recorded
    is_handed_over: bool  # True if the caller passes micro-batches
    missing: MissingGraph | None = None  # the graph to record first, with inputs on the CPU
    numbers: tuple[int, ...] = ()  # by micro-batch: its program
    inputs: RankInputs = field(default_factory=RankInputs)  # without tensors, except pieces on the CPU


class RankState(PipelineState):
    group: RankGroup
    engine: RankEngine
    can_overlap_updates = False  # all ranks decide at the end of a step whether it is committed

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None, group: RankGroup):
        super().__init__(model, settings, plan, RankEngine(model, group))
        self.group = group
        self.outputs = "last"  # "last" or "all": the ranks that get the output of a call
        self.held: HeldTensors | None = None
        # Tensors of a model built on the meta device: each rank initializes its own tensors only.
        self.without_values = frozenset(names_without_values(model))
        self._awaits_values = bool(self.without_values)
        self.checks_evaluation &= group.is_first and not self._awaits_values  # one rank warns
        self._numbered: dict[int, tuple[Traced, RankProgram]] = {}  # the same on all ranks
        self._next_number = 0

    @property
    def leader(self) -> int:
        """The rank that reads the inputs: the rank of the first stage, or rank 0 if there is no plan yet."""
        return 0 if self.first is None else self.settings.placement[0]

    @property
    def last(self) -> int:
        return self.settings.placement[-1]

    def own_names(self) -> tuple[str, ...]:
        if self.held is None:
            raise StateError(
                "the pipe has no plan yet, so nobody knows which parameters this rank has: give example_args to "
                "fxpipe.pipeline, or make the optimizer behind the first step"
            )
        return tuple(name for name in self.held.names if self.group.rank in self.held.holders(name))

    def own_tensors(self) -> dict[str, torch.Tensor]:
        names = {*self.own_names()}
        return {name: tensor for name, tensor in super().own_tensors().items() if name in names}

    def device_of(self, name: str) -> torch.device:
        return self.group.device

    def own_without_values(self) -> list[str]:
        missing = [name for name, tensor in self.own_tensors().items() if not has_values(tensor)]
        held = container_tensors(self.model)
        for _, bound in self._numbered.values():
            constants = bound.constants
            constants.update({n: held[n] for n, old in constants.items() if n in held and not has_values(old)})
            own = bound.program.first_users(self._own_stages(self.settings.placement))
            missing += [name for name in own if name in constants and not has_values(constants[name])]
        return list(dict.fromkeys(missing))

    def _own_stages(self, placement: Sequence[int]) -> Sequence[int]:
        return [j for j, rank in enumerate(placement) if rank == self.group.rank]

    def _check_values_to_record(self) -> None:
        """Allows missing values: a model without values is recorded on fake tensors."""

    def update(self, optimizer: StagewiseOptimizer) -> None:
        """Updates the parameters of this rank in this thread, which is its worker."""
        with self.engine.running():
            if self.first is not None:
                self.parameters_by_stage(optimizer)
            optimizer.step_parameters(optimizer.parameters())

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Runs checks and the step on all ranks together: if one rank refuses a call, the others raise."""
        self.check_open()
        with self.engine.running(), self.group.together():
            yield

    def running(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def read_micro_batches(self, micro_batches: Any) -> list[ModelCall] | None:
        is_needed = not isinstance(micro_batches, (tuple, list)) or bool(micro_batches)
        return super().read_micro_batches(micro_batches) if is_needed else None

    def train(
        self,
        calls: Sequence[ModelCall] | None,
        is_handed_over: bool,
        call: LossCall,
        optimizer: StagewiseOptimizer | None,
    ) -> tuple[torch.Tensor, Any, bool]:
        if optimizer is not None and not self.engine.replicas.is_synced:
            raise ArgumentError(
                "optimizer= within no_sync(): replicas would each be updated with gradients of their own; give it "
                "to the last call, outside"
            )
        name = BATCH_TRAINING if call.reduction == "batch" else TRAINING
        inputs = self.agree(name, calls, is_handed_over)
        targets = (calls or [])[0].target if not is_handed_over else ()
        if is_handed_over and self.group.rank == self.last:
            targets = tuple(one.target for one in self._required(calls))
            if len(targets) != len(inputs.bounds):
                raise ArgumentError(
                    f"rank {self.group.rank} has the last stage and was given {len(targets)} micro_batches, and rank "
                    f"{self.leader}, of the first stage, {len(inputs.bounds)}: give them the same"
                )
        schedule, inputs = self.schedule_of(inputs, call.reduction), replace(inputs, targets=targets)
        return (*self.engine.train_ranks(inputs, schedule, call, to_all=self.outputs == "all"), False)

    def agree(
        self, call: str, calls: Sequence[ModelCall] | None, is_handed_over: bool = False, seed: int | None = None
    ) -> RankInputs:
        """Determines with all ranks what runs now. The leader looks up the graphs; all ranks record missing ones."""
        # `calls`: None if this rank does not need them. `seed`: of the step, on the leader; None to draw one.
        group, graphs, has_recorded = self.group, list[CachedGraph](), False
        while True:
            is_planning, leader, job = self.first is None, self.leader, None
            if group.rank == leader:
                job = self._propose(call, self._required(calls), is_handed_over, seed, graphs)
            if is_planning:
                job = group.broadcast(job, "the first stage's inputs")
            else:
                job = group.connection.broadcast(job, leader, "the first stage's inputs", is_long=has_recorded)
            self.check_call(job, call, is_handed_over)
            if job.missing is None:
                break
            self.record(job.missing, job.seed, graphs)
            has_recorded = True
            if is_planning:  # with the inputs of the first replica; another rank may lead now
                graphs.clear()
        if self._awaits_values:
            if missing := self.own_without_values():
                raise StateError(
                    f"rank {group.rank} has no values for {names_text(missing)}: the model was built on the meta "
                    "device. Before the first step, on all ranks, load a checkpoint, fxpipe.distributed.load(pipe, "
                    "path), or initialize the parameters, fxpipe.distributed.initialize(pipe)"
                )
            self._awaits_values = False
        inputs = self.inputs_of(job, calls)
        if seed is None and group.rank != leader and any(bound.program.is_random for bound in inputs.bounds):
            draw_seed()  # advance the generators of all ranks as in one process
        return inputs

    def inputs_of(self, job: Job, calls: Sequence[ModelCall] | None) -> RankInputs:
        """Returns the inputs of a step; only the leader has leaves."""
        sizes, is_handed_over = job.inputs.sizes, job.is_handed_over
        if self.group.rank == self.leader:
            leaves = [flatten((one.args, one.kwargs))[0] for one in calls or ()]
        else:
            leaves = [[None] * len(of_one) for of_one in (sizes if is_handed_over else [sizes])]
        programs = tuple(self._numbered[number][1] for number in job.numbers)
        return replace(
            job.inputs,
            bounds=programs,
            union=RankProgram.union(programs),
            replicas=self.group.replica_count,
            leaves=leaves if is_handed_over else leaves[0],
            known=map_tensor_leaves(lambda t: t.to(self.group.device), job.inputs.known),
        )

    def _required(self, calls: Sequence[ModelCall] | None) -> Sequence[ModelCall]:
        """Returns the calls that this rank needs. Raises `ArgumentError` if the caller has passed none."""
        is_leader = self.group.rank == self.leader
        if calls is None:
            missing = "micro_batches, but was given none"
        elif is_leader and not any(
            isinstance(leaf, torch.Tensor) for one in calls for leaf in flatten((one.args, one.kwargs))[0]
        ):
            missing = "inputs, but was given no tensor"
        else:
            return calls
        stage, flag = ("first", "needs_inputs") if is_leader else ("last", "needs_target")
        raise ArgumentError(
            f"rank {self.group.rank} has the {stage} stage and needs the {missing}; pass them on each rank where "
            f"pipe.{flag} is True"
        )

    def _propose(
        self, call: str, calls: Sequence[ModelCall], is_handed_over: bool, seed: int | None, graphs: list[CachedGraph]
    ) -> Job:
        """Returns the leader's job. `graphs`: of the first calls, as for `look_up`."""
        peeked = peek_seed() if seed is None else seed
        own = self.look_up(calls, is_handed_over, call != EVALUATION, peeked, graphs)
        if isinstance(own, MissingGraph):
            return Job(call, self._mode(), peeked, is_handed_over, own._replace(call=_on_cpu(own.call)))
        if seed is None:
            seed = draw_seed() if any(bound.program.is_random for bound in own.bounds) else 0
        return self.job_of(call, own, seed)

    def job_of(self, call: str, own: GivenInputs, seed: int) -> Job:
        known, bound, leaves, is_handed_over = {}, own.bound, own.leaves, own.is_handed_over
        is_own = bound.head is None or self.group.replica_count == 1  # else they may depend on all samples
        if bound.known_pieces is not None and not is_handed_over and is_own:
            known = map_tensor_leaves(lambda t: t.detach().cpu(), dict(bound.known_pieces(leaves, own.batch)))
        sizes = tuple(map(_sizes_of, leaves)) if is_handed_over else _sizes_of(leaves)
        inputs = RankInputs(samples=own.samples, is_handed_over=is_handed_over, sizes=sizes, seed=seed, known=known)
        numbers = {id(program): number for number, (_, program) in self._numbered.items()}
        of_bounds = tuple(numbers[id(bound)] for bound in own.bounds)
        return Job(call, self._mode(), seed, is_handed_over, numbers=of_bounds, inputs=inputs)

    def _mode(self) -> str:
        """Returns a digest of the modes of the modules and of this thread."""
        flags = "".join("t" if module.training else "e" for module in all_modules(self.model))
        return hashlib.sha256(f"{flags} {ThreadState.now()}".encode()).hexdigest()[:16]

    def check_call(self, job: Job, call: str, is_handed_over: bool = False) -> None:
        """Raises `StateError` if this rank and the leader make different calls, or are in different modes."""
        theirs, own = (
            f"{name}{' with micro_batches' if with_parts else ''}"
            for name, with_parts in ((job.call, job.is_handed_over), (call, is_handed_over))
        )
        if theirs != own:
            more = "; where the micro-batches are not needed, micro_batches=() says enough"
            raise StateError(
                f"rank {self.leader} calls {theirs}, and rank {self.group.rank} calls {own}: all ranks make the same "
                f"calls in the same order{more if job.call == call else ''}"
            )
        if job.mode != self._mode():
            raise StateError(
                f"rank {self.leader} and rank {self.group.rank} call {call} in different modes: train() and eval(), "
                "grad mode and autocast must be the same on all ranks"
            )

    def _may_choose_chunks(self, batch: int) -> bool:
        return False  # the plan has decided on all ranks

    def with_micro_batches(self, inputs: RankInputs, micro_batches: int) -> RankInputs:
        """Returns the inputs of a mini-batch split into this number of micro-batches, as on the other replicas."""
        if micro_batches == len(inputs.samples):
            return inputs
        sizes, programs = samples_per_micro_batch(inputs.batch, micro_batches), (inputs.union,) * micro_batches
        self._numbered[inputs.union.number][0].refuse_uneven_outputs(inputs.batch, sizes)
        return replace(inputs, bounds=programs, samples=tuple(sizes))

    def check_stream_program(self, bound: BoundProgram, held: Collection[int]) -> None:
        super().check_stream_program(bound, held)
        assert isinstance(bound, RankProgram)
        tensors, transfers = ModelTensors(self.model, bound.constants), bound.transfers
        tied = (name for keys in transfers.gradients.values() for name, _ in keys if tensors.get(name).requires_grad)
        others = (name for names in (*transfers.borrowed.values(), *transfers.changed.values()) for name in names)
        for name in (*tied, *others):
            raise StateError(
                f"{name!r} is used by stages of several ranks, which exchange it or its gradients at the end of a "
                "step, and a stream has none: let one stage have all of it (balance=), untie it, freeze it, or train "
                "with forward_backward"
            )

    def record_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans with the example inputs of rank 0, if it has any, and records their graph on all ranks."""
        own = MissingGraph(_on_cpu(ModelCall(args, kwargs, ())), 0, None) if args or kwargs else None
        missing, seed = self.group.broadcast((own, peek_seed()), "the example inputs")
        if missing is not None:
            self.record(missing, seed, [])

    def record(self, missing: MissingGraph, seed: int, graphs: list[CachedGraph]) -> None:
        """Records a graph on all ranks and compares it. If this fails on one rank, it is undone on all."""
        state, graphs_before = {**vars(self)}, [*self.graphs]
        own = missing._replace(call=_moved(missing.call, lambda t: t.to(self.group.device)))
        try:
            if self.first is not None:  # forward may read values that are trained on other ranks
                assert self.held is not None
                _, program = next(iter(self._numbered.values()))
                self._send(self.held.names, program.constants)
            elif not self.group.is_first:
                self.given_plan, decided = self.group.broadcast(None, "the plan")
                self.settings = replace(self.settings, **decided, left=frozenset())
            super().record(own, seed, graphs)
        except BaseException:
            vars(self).update(state)
            self.graphs[:] = graphs_before
            raise

    def take_plan_of(self, prepared: PreparedGraph) -> PreparedGraph:
        """Also sends the plan of rank 0 to the other ranks."""
        first = super().take_plan_of(prepared)
        if self.group.is_first:
            decided = {name: getattr(self.settings, name) for name in DECIDED}
            decided = {name: value for name, value in decided.items() if not callable(value)}  # each rank has functions
            self.group.broadcast((self.plan, decided), "the plan")
        else:
            self.plan = self.given_plan
        devices = max(self.settings.placement) + 1
        if devices != self.group.size:
            raise ArgumentError(
                f"the plan has stages for {devices} devices, but the process group has {self.group.size} ranks: start "
                f"{devices}, or pin stages to all of them"
            )
        return first

    def bind(self, prepared: PreparedGraph) -> RankProgram:
        """Also compares the program between ranks, and decides which ranks hold the tensors of the model."""
        bound, placement = super().bind(prepared), self.settings.placement
        schedule, checkpoint = _value_text(self.settings.schedule), self.settings.checkpoint
        fields = {
            "graph": f"fingerprint {prepared.traced.fingerprint()}",
            "plan": f"stages on ranks {tuple(placement)}, chunks {self.settings.chunks}, checkpoint {checkpoint}, "
            f"schedule {schedule}",
        }
        for j, stage in enumerate(bound.program.stages):
            code = re.sub(r" +#.*", "", stage.code)  # paths of source lines may differ between machines
            text = repr((code, stage.attributes, stage.receives, stage.sends, stage.assigns))
            fields[f"stage {j}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        check_agreement(self.group, fields, between_replicas=self.held is None)
        routes = relay_routes(bound.wiring.users, placement)
        if self.held is None:
            tensors = ModelTensors(self.model, bound.constants)
            used = {id(tensors.get(name)) for name in bound.program.first_users()}
            names = {id(tensor): slot.name for slot, tensor in slots_of(self.model).items() if id(tensor) not in used}
            self.held = HeldTensors(bound.program, routes, names.values())
            if self.group.replica_count > 1:  # each rank may have drawn different values
                self._send(self.own_names(), bound.constants, to_replicas=True)
            self._send(self.held.shared, bound.constants)
        number, transfers = self._next_number, self.held.transfers([bound.program], routes)
        own = {one.name: getattr(bound, one.name) for one in fields_of(bound)}
        program = RankProgram(**own, number=number, routes=routes, held=self.held, transfers=transfers)
        self._numbered = dict([*self._numbered.items(), (number, (prepared.traced, program))][-MAX_GRAPHS:])
        self._next_number = number + 1
        return program

    @torch.no_grad()
    def _send(self, names: Sequence[str], constants: dict[str, torch.Tensor], to_replicas: bool = False) -> None:
        """Sends all ranks, or all replicas, the values of tensors, unless only ranks that hold them have values."""
        assert self.held is not None
        tensors, group = ModelTensors(self.model, constants), self.group
        for name in names:
            tensor, source = tensors.get(name), 0 if to_replicas else self.held.holders(name)[0]
            if tensor.layout is torch.strided and name not in self.without_values:
                connection = group.replicas if to_replicas else group.connection
                connection.broadcast_tensor(tensor.detach(), source, f"the values of {name}")


def _sizes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def _moved(call: ModelCall, move: Callable[[torch.Tensor], torch.Tensor]) -> ModelCall:
    args, kwargs = map_tensor_leaves(move, (call.args, call.kwargs))
    return ModelCall(args, kwargs, ())


def _on_cpu(call: ModelCall) -> ModelCall:
    return _moved(call, lambda t: t.detach().cpu().requires_grad_(t.requires_grad))


def check_agreement(group: RankGroup, own: Fields, *, between_replicas: bool = True, is_long: bool = True) -> None:
    """Raises `ArgumentError` on all ranks (else: of this replica) if fields differ. `is_long`: they may be planning."""
    what, replicas = "what the other ranks have", group.replica_count if between_replicas else 1
    if between_replicas:
        everybody = [fields for row in group.everybody(dict(own), what, is_long=is_long) for fields in row]
    else:
        everybody = group.connection.all_gather(dict(own), what, is_long=is_long)
    problems = []
    for name in own:
        ranks: dict[str, list[int]] = {}
        for rank, fields in enumerate(everybody):
            ranks.setdefault(fields.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{rank_names(those, len(everybody) // replicas, replicas)}: {_around_difference(text, [*ranks])}"
                for text, those in ranks.items()
            )
            problems.append(f"{name} ({values}): give all ranks the same")
    if problems:
        raise ArgumentError("ranks differ in " + "; and in ".join(problems))


def _around_difference(text: str, texts: Sequence[str]) -> str:
    """Returns the part of a text where it first differs from the others."""
    if len(text) <= LONGEST_SHOWN:
        return text
    columns = enumerate(zip(*texts, strict=False))
    first = next((k for k, letters in columns if len({*letters}) > 1), min(map(len, texts)))
    start = max(0, first - LONGEST_SHOWN // 4)
    return f"... {text[start : start + LONGEST_SHOWN]} ..."


def model_fields(model: nn.Module, settings: Settings) -> Fields:
    """Returns the fields that must be equal before there is a plan."""
    from fxpipe import __version__

    tensors = [
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if has_values(tensor) else " without values")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return {
        "versions": f"torch {torch.__version__}, fxpipe {__version__}, Python {sys.version.split()[0]}",
        "model": f"{type(model).__qualname__}: {', '.join(tensors)}",
        **{name: _value_text(getattr(settings, name)) for name in COMPARED_SETTINGS},
    }


def _value_text(value: Any) -> str:
    """Returns a text without addresses, which is equal in other processes."""
    if isinstance(value, Schedule):
        value = str(value)
    elif callable(value):
        value = getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
