"""The graphs of a pipe over processes: all ranks record them together.

The rank of the first stage, the *leader*, reads the inputs of a step and sends the others a job: which graph runs, and
the number of samples. If the graph is not recorded yet, the leader sends the inputs, and all ranks record it. Rank 0
alone makes the first plan, since measured times differ between ranks; the others use the plan of rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from fxpipe._torch.module_internals import all_modules
from fxpipe._torch.thread_state import ThreadState
from fxpipe.distributed.agreement import check_agreement, graph_fields
from fxpipe.distributed.held_tensors import HeldTensors
from fxpipe.distributed.rank_engine import RankEngine, RankGraph, RankInputs
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import ArgumentError, StateError
from fxpipe.pipe.graph_cache import MAX_GRAPHS, CachedGraph
from fxpipe.pipe.model_calls import ModelCall
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.options.stage_placement import DROP_IN_SCHEDULE
from fxpipe.planning.passes import PreparedGraph
from fxpipe.planning.plans import Plan
from fxpipe.rewriting.relay_routes import relay_routes
from fxpipe.runtime import BoundProgram, InlineExecutor
from fxpipe.runtime.bound_program import ModelTensors, different_programs
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.model_state import container_tensors, slots_of
from fxpipe.tracing.tensors import has_values
from fxpipe.utils.batch_split import samples_per_micro_batch
from fxpipe.utils.pytree import flatten, map_tensor_leaves
from fxpipe.utils.random_generators import draw_seed, peek_seed
from fxpipe.utils.units import names_text

T = TypeVar("T")

TRAINING, STREAM = "forward_backward", "train_stream"
BATCH_TRAINING = "forward_backward with reduction='batch'"


@dataclass(frozen=True, slots=True)
class Decisions:
    """The planning decisions of rank 0."""

    plan: Plan
    placement: tuple[int, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    schedule: Any  # None for a user's function, which each rank has


@dataclass(frozen=True, slots=True)
class Job:
    """The message of the leader to the other ranks that describes a step."""

    call: str  # the method; all ranks must call the same
    mode: str  # digest of the modes of modules and thread
    is_handed_over: bool = False  # True if the caller passes micro-batches
    inputs: Any = None  # to record a graph with: (args, kwargs)
    count: int | None = None  # number of micro-batches passed, one of which is in `inputs`
    peeked_seed: int = 0  # seeds the random numbers that forward draws while it is recorded
    seed: int = 0
    numbers: tuple[int, ...] = ()  # graph number, by micro-batch
    samples: tuple[int, ...] = ()
    sizes: tuple[Any, ...] = ()
    known: Any = None  # pieces of the mini-batch, by index

    @property
    def batch(self) -> int:
        return sum(self.samples)


class RankState(PipelineState):
    """The state of a pipe on one rank."""

    can_overlap_updates = False  # all ranks decide at the end of a step whether it is committed

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None, group: RankGroup):
        super().__init__(model, settings, plan, InlineExecutor())
        self.group = group
        self.outputs = "last"  # "last" or "all": the ranks that get the output of a call
        self.engine: RankEngine = RankEngine(model, group)
        self.held: HeldTensors | None = None
        # Tensors of a model built on the meta device: each rank initializes its own tensors only.
        self.without_values = frozenset(names_without_values(model))
        self._awaits_values = bool(self.without_values)
        self.checks_evaluation &= group.is_first and not self._awaits_values  # one rank warns
        self._numbered: dict[int, tuple[PreparedGraph, RankGraph]] = {}
        self._next_number = 0
        self._proposes = ""  # the call for which the leader looks for graphs

    # -- who has what ------------------------------------------------------------------------------------------------

    @property
    def leader(self) -> int:
        """The rank that reads the inputs: the rank of the first stage, or rank 0 if there is no plan yet."""
        return 0 if self.first is None else self.settings.placement[0]

    @property
    def last(self) -> int:
        return self.settings.placement[-1]

    def own_names(self) -> tuple[str, ...]:
        """Returns the names of the tensors that this rank holds. Raises `StateError` if there is no plan yet."""
        if self.held is None:
            raise StateError(
                "the pipe has no plan yet, so nobody knows which parameters this rank has: give example_args to "
                "fxpipe.pipeline, or make the optimizer behind the first step"
            )
        return self.held.names_of(self.group.rank)

    def together(self) -> contextlib.AbstractContextManager[object]:
        return self.group.together()

    def from_all(self, value: T, what: str) -> list[T]:
        return self.group.connection.all_gather(value, what)

    def from_first(self, value: T, what: str) -> T:
        result: T = self.group.broadcast(value, what)
        return result

    def own_tensors(self) -> dict[str, torch.Tensor]:
        names = {*self.own_names()}
        return {name: tensor for name, tensor in super().own_tensors().items() if name in names}

    def device_of(self, name: str) -> torch.device:
        return self.group.device

    def own_without_values(self) -> list[str]:
        missing = [name for name, tensor in self.own_tensors().items() if not has_values(tensor)]
        held = container_tensors(self.model)
        for _, graph in self._numbered.values():
            constants = graph.bound.constants
            constants.update({n: held[n] for n, old in constants.items() if n in held and not has_values(old)})
            own = [s for j, s in enumerate(graph.bound.program.stages) if graph.routes.is_here(j, self.group.rank)]
            missing += [n for stage in own for n in stage.attributes if n in constants and not has_values(constants[n])]
        return list(dict.fromkeys(missing))

    def _check_values(self) -> None:
        """Raises `StateError` before a step if tensors of this rank have no values."""
        if self._awaits_values:
            if missing := self.own_without_values():
                raise StateError(
                    f"rank {self.group.rank} has no values for {names_text(missing)}: the model was built on the meta "
                    "device. Before the first step, on all ranks, load a checkpoint, fxpipe.distributed.load(pipe, "
                    "path), or initialize the parameters, fxpipe.distributed.initialize(pipe)"
                )
            self._awaits_values = False

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

    # -- a step ------------------------------------------------------------------------------------------------------

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
        graph, inputs = self.agree(name, calls, is_handed_over)
        targets = self.targets_of(calls, inputs) if is_handed_over else (calls or [])[0].target
        order = DROP_IN_SCHEDULE if inputs.takes_all(call.reduction) else None
        schedule = self.schedule_for(len(inputs.samples), order)
        inputs = replace(inputs, targets=targets)
        return (*self.engine.train_ranks(graph, inputs, schedule, call, to_all=self.outputs == "all"), False)

    def agree(
        self, call: str, calls: Sequence[ModelCall] | None, is_handed_over: bool = False, seed: int | None = None
    ) -> tuple[RankGraph, RankInputs]:
        """Determines with all ranks what runs now. The leader finds the graphs; if one is missing, all ranks record it.

        Args:
            calls: a mini-batch, or the micro-batches passed by the caller; None if this rank does not need them.
            seed: the seed of the step on the leader, any number elsewhere; None to draw one.
        """
        is_leader = self.group.rank == self.leader
        if self.first is None:  # plan and record with the inputs of the first replica
            job = self._first_job(call, self._required(calls), is_handed_over, seed) if is_leader else None
            job = self.group.broadcast(job, "the first stage's inputs")
            self._check_call(job, call, is_handed_over)
            self._record(job.inputs, job.peeked_seed, job.count)
            is_leader = self.group.rank == self.leader
        if is_leader:
            job = self._broadcast(self._propose(call, self._required(calls), is_handed_over, seed))
        else:
            job = self._broadcast(None)
            self._check_call(job, call, is_handed_over)
            while job.inputs is not None:
                self._record(job.inputs, job.peeked_seed, job.count)
                job = self._broadcast(None, is_long=True)
        self._check_values()
        inputs = self._inputs_of(job, calls)
        if any(graph.bound.program.is_random for graph in inputs.graphs) and not is_leader and seed is None:
            draw_seed()  # advance the generators of all ranks as in one process
        return self._union(inputs.graphs), inputs

    def targets_of(self, calls: Sequence[ModelCall] | None, inputs: RankInputs) -> tuple[Any, ...]:
        """Returns the targets of the micro-batches passed by the caller, on the rank of the last stage."""
        if self.group.rank != self.last:
            return ()
        targets = tuple(one.target for one in self._required(calls))
        if len(targets) != len(inputs.graphs):
            raise ArgumentError(
                f"rank {self.group.rank} has the last stage and was given {len(targets)} micro_batches, and rank "
                f"{self.leader}, of the first stage, {len(inputs.graphs)}: give them the same"
            )
        return targets

    def _inputs_of(self, job: Job, calls: Sequence[ModelCall] | None) -> RankInputs:
        """Returns the inputs of a step; only the leader has the leaves."""
        if self.group.rank == self.leader:
            leaves = [flatten((one.args, one.kwargs))[0] for one in calls or ()]
        else:
            leaves = [[None] * len(sizes) for sizes in (job.sizes if job.is_handed_over else [job.sizes])]
        known = {} if job.known is None else map_tensor_leaves(lambda t: t.to(self.group.device), job.known)
        graphs = tuple(self._numbered[number][1] for number in job.numbers)
        own = leaves if job.is_handed_over else leaves[0]
        bounds = tuple(graph.bound for graph in graphs)
        return RankInputs(bounds, own, job.samples, (), job.is_handed_over, graphs, job.sizes, job.seed, known)

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

    def _first_job(self, call: str, calls: Sequence[ModelCall], is_handed_over: bool, seed: int | None) -> Job:
        """Returns the job to plan with: the mini-batch, or the largest micro-batch."""
        seed = peek_seed() if seed is None else seed
        largest = max(self._graph_inputs(calls, seed), key=lambda one: one.elements)
        return self._recording_job(call, largest.call, seed, len(calls) if is_handed_over else None)

    def _recording_job(self, call: str, one: ModelCall, seed: int, count: int | None) -> Job:
        inputs = map_tensor_leaves(lambda t: t.detach().cpu().requires_grad_(t.requires_grad), (one.args, one.kwargs))
        return Job(call, self._mode(), count is not None, inputs, count, seed)

    def _record_graph(self, call: ModelCall, seed: int, count: int | None) -> CachedGraph:
        job = self._broadcast(self._recording_job(self._proposes, call, seed, count))
        return self._record(job.inputs, seed, count)

    def _propose(self, call: str, calls: Sequence[ModelCall], is_handed_over: bool, seed: int | None) -> Job:
        self._proposes = call
        given_inputs = self.find(calls, is_handed_over, call in (TRAINING, BATCH_TRAINING, STREAM), seed)
        if seed is None:
            seed = draw_seed() if any(bound.program.is_random for bound in given_inputs.bounds) else 0
        return self._job_of(call, given_inputs, seed)

    def _job_of(self, call: str, given_inputs: GivenInputs, seed: int) -> Job:
        numbers = {id(graph.bound): number for number, (_, graph) in self._numbered.items()}
        pieces, bound = None, given_inputs.bound
        if bound.known_pieces is not None and not given_inputs.is_handed_over:
            pieces = map_tensor_leaves(
                lambda t: t.detach().cpu(), dict(bound.known_pieces(given_inputs.leaves, given_inputs.batch))
            )
        sizes = (
            tuple(map(_sizes_of, given_inputs.leaves))
            if given_inputs.is_handed_over
            else _sizes_of(given_inputs.leaves)
        )
        return Job(
            call,
            self._mode(),
            given_inputs.is_handed_over,
            seed=seed,
            numbers=tuple(numbers[id(bound)] for bound in given_inputs.bounds),
            samples=given_inputs.samples,
            sizes=sizes,
            known=pieces,
        )

    def _union(self, graphs: tuple[RankGraph, ...]) -> RankGraph:
        """Returns one graph for a step over micro-batches of these graphs."""
        first = graphs[0]
        if all(graph is first for graph in graphs):
            return first
        numbers = tuple(graph.number for graph in graphs)
        programs = [bound.program for bound in different_programs([graph.bound for graph in graphs])]
        return replace(first, number=numbers, transfers=first.held.transfers(programs, first.routes))

    def _broadcast(self, job: Job | None, is_long: bool = False) -> Job:
        what = "the first stage's inputs"
        result: Job = self.group.connection.broadcast(job, self.leader, what, is_long=is_long)
        return result

    def _mode(self) -> str:
        """Returns a digest of the modes of the modules and of this thread, equal in all processes with these modes."""
        flags = "".join("t" if module.training else "e" for module in all_modules(self.model))
        return hashlib.sha256(f"{flags} {ThreadState.now()}".encode()).hexdigest()[:16]

    def _check_call(self, job: Job, call: str, is_handed_over: bool = False) -> None:
        if job.call == call and job.is_handed_over != is_handed_over:
            ways = "with a mini-batch", "with micro_batches"
            theirs, own = (ways[::-1] if is_handed_over else ways)[::-1]
            raise StateError(
                f"rank {self.leader} calls {call} {theirs}, and rank {self.group.rank} {own}: all ranks make the same "
                "calls; where the micro-batches are not needed, micro_batches=() says enough"
            )
        if job.call != call:
            raise StateError(
                f"rank {self.leader} calls {job.call}, and rank {self.group.rank} calls {call}: all ranks make the "
                "same calls in the same order"
            )
        if job.mode != self._mode():
            raise StateError(
                f"rank {self.leader} and rank {self.group.rank} call {call} in different modes: train() and eval(), "
                "grad mode and autocast must be the same on all ranks"
            )

    # -- streams -----------------------------------------------------------------------------------------------------

    def _may_choose_chunks(self, batch: int) -> bool:
        return False  # the plan has decided on all ranks

    def job_at_hand(self, graph: RankGraph, call: ModelCall, seed: int) -> Job | None:
        """Returns the job of a mini-batch of a stream; None if it needs another graph. The leader calls it."""
        given_inputs = self.find_known(call, seed)
        return (
            None
            if given_inputs is None or given_inputs.bound is not graph.bound
            else self._job_of(STREAM, given_inputs, seed)
        )

    def inputs_at_hand(self, job: Job, call: ModelCall | None) -> RankInputs:
        """Returns the inputs for the job of a mini-batch of a stream. `call`: on the leader only."""
        self._check_call(job, STREAM)
        return self._inputs_of(job, None if call is None else [call])

    def with_micro_batches(self, inputs: RankInputs, micro_batches: int) -> RankInputs:
        """Returns the inputs of a mini-batch split into this number of micro-batches, as on the other replicas."""
        if micro_batches == len(inputs.samples):
            return inputs
        sizes, (graph, *_) = samples_per_micro_batch(inputs.batch, micro_batches), inputs.graphs
        prepared, _ = self._numbered[graph.number]
        prepared.traced.refuse_uneven_outputs(inputs.batch, sizes)
        graphs, bounds = (graph,) * micro_batches, (graph.bound,) * micro_batches
        return replace(inputs, graphs=graphs, bounds=bounds, samples=tuple(sizes))

    def check_stream_graph(self, graph: RankGraph, held: Collection[int]) -> None:
        """Raises `StateError` if a graph cannot run in a stream. `held`: ids of trained parameters."""
        self.check_stream_program(graph.bound, held)
        tensors, transfers = ModelTensors(self.model, graph.bound.constants), graph.transfers
        tied = (name for keys in transfers.gradients.values() for name, _ in keys if tensors.get(name).requires_grad)
        others = (name for names in (*transfers.borrowed.values(), *transfers.changed.values()) for name in names)
        for name in (*tied, *others):
            raise StateError(
                f"{name!r} is used by stages of several ranks, which exchange it or its gradients at the end of a "
                "step, and a stream has none: let one stage have all of it (balance=), untie it, freeze it, or train "
                "with forward_backward"
            )

    # -- graphs ------------------------------------------------------------------------------------------------------

    def record_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans with the example inputs of rank 0, and records their graph on all ranks."""
        own = map_tensor_leaves(lambda t: t.detach().cpu().requires_grad_(t.requires_grad), (args, kwargs))
        inputs, seed = self.group.broadcast((own, peek_seed()), "the example inputs")
        self._record(inputs, seed)

    def _record(self, inputs: Any, seed: int, micro_batches: int | None = None) -> CachedGraph:
        """Records a graph on all ranks and compares it. `micro_batches`: their number, if `inputs` is one of them."""
        args, kwargs = map_tensor_leaves(lambda t: t.to(self.group.device), inputs)
        known = {id(bound) for _, bound in self.graphs}
        if self.first is None:
            graph = self._plan(args, kwargs, seed, micro_batches)
        else:
            self._refresh()
            graph = self._make_graph(args, kwargs, seed, micro_batches)
        for prepared, bound in self.graphs:
            if id(bound) not in known:
                self._number(prepared, bound)
        while len(self._numbered) > MAX_GRAPHS:
            del self._numbered[min(self._numbered)]
        return graph

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, count: int | None) -> CachedGraph:
        decisions = None
        if self.group.is_first:
            graph = self._make_graph(args, kwargs, seed, count)
            assert self.plan is not None
            settings = self.settings
            schedule = None if callable(settings.schedule) else settings.schedule
            decisions = Decisions(self.plan, settings.placement, settings.chunks, settings.checkpoint, schedule)
        decisions = self.group.broadcast(decisions, "the plan")
        if not self.group.is_first:
            self.given_plan = decisions.plan
            self.settings = replace(
                self.settings,
                placement=decisions.placement,
                chunks=decisions.chunks,
                checkpoint=decisions.checkpoint,
                schedule=self.settings.schedule if decisions.schedule is None else decisions.schedule,
                left=frozenset(),
            )
            graph = self._make_graph(args, kwargs, seed, count)
            self.plan = decisions.plan
        devices = max(self.settings.placement) + 1
        if devices != self.group.size:
            raise ArgumentError(
                f"the plan has stages for {devices} devices, but the process group has {self.group.size} ranks: start "
                f"{devices}, or pin stages to all of them"
            )
        return graph

    def _number(self, prepared: PreparedGraph, bound: BoundProgram) -> None:
        placement = self.settings.placement
        fields = graph_fields(prepared.traced.fingerprint(), bound, placement, self.settings)
        check_agreement(self.group, fields, between_replicas=self.held is None)
        routes = relay_routes(bound.wiring.users, placement)
        if self.held is None:
            tensors = ModelTensors(self.model, bound.constants)
            used = {id(tensors.get(name)) for stage in bound.program.stages for name in stage.attributes}
            names = {id(tensor): slot.name for slot, tensor in slots_of(self.model).items() if id(tensor) not in used}
            self.held = HeldTensors(bound.program, routes, names.values())
            self._send_to_replicas(bound.constants)  # each rank may have drawn different values
            self._send_from_home(self.held.shared, bound.constants)
        transfers = self.held.transfers([bound.program], routes)
        self._numbered[self._next_number] = (
            prepared, RankGraph(self._next_number, bound, routes, self.held, transfers)
        )  # fmt: skip
        self._next_number += 1

    def _refresh(self) -> None:
        """Sends all ranks the values of tensors trained on other ranks: forward may read them."""
        assert self.held is not None
        _, graph = next(iter(self._numbered.values()))
        self._send_from_home(self.held.names, graph.bound.constants)

    @torch.no_grad()
    def _send_to_replicas(self, constants: dict[str, torch.Tensor]) -> None:
        tensors = ModelTensors(self.model, constants)
        for name in self.own_names() if self.group.replica_count > 1 else ():
            tensor = tensors.get(name)
            if tensor.layout is torch.strided and name not in self.without_values:
                self.group.replicas.broadcast_tensor(tensor.detach(), 0, f"the values of {name}")

    @torch.no_grad()
    def _send_from_home(self, names: Sequence[str], constants: dict[str, torch.Tensor]) -> None:
        """Sends all ranks the values of each tensor's home, unless only ranks that hold the tensor have values."""
        assert self.held is not None
        tensors, connection = ModelTensors(self.model, constants), self.group.connection
        for name in names:
            tensor = tensors.get(name)
            if tensor.layout is torch.strided and name not in self.without_values:
                connection.broadcast_tensor(tensor.detach(), self.held.holders(name)[0], f"the values of {name}")


def _sizes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
