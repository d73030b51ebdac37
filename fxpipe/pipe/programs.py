"""The programs of one model: each step asks `Programs` for the program of its call.

    call ──▶ its key ──▶ the graph that fits ──▶ its program on devices ──▶ the inputs of the step
                             └── none: record, split, bind, and look up again

A *call* is a mini-batch, or one of several micro-batches. Its *key* has the structure of the inputs, the mode of the
modules and the state of the thread; then conditions on sizes and guards are compared. If a dimension of an input, other
than the batch, has a second size, it becomes dynamic: the next graph is recorded for any size of it, if forward allows
(`dynamic_sizes`). The first graph decides the stages and the devices of parameters; later graphs are split so that
nodes stay with their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import module_flags
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError, FxpipeError, StateError
from fxpipe.pipe.model_calls import ModelCall, note_of_micro_batch
from fxpipe.planning import passes
from fxpipe.planning.entry import prepare
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.planning.passes import PreparedGraph, prepare_additional_graph
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning.candidates import with_best_chunks
from fxpipe.runtime.bound_program import BoundProgram, StageReplica
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.wiring import wire_program
from fxpipe.tracing.dynamic_sizes import TOO_LONG, DynamicDims, InputDim
from fxpipe.tracing.fake_tensors import names_without_values
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.record.recorded_sizes import refuse_other_answers
from fxpipe.tracing.shapes.output_dims import InputValues
from fxpipe.tracing.source_lines import warn_user
from fxpipe.tracing.tensors import has_values
from fxpipe.tracing.traced import GraphKey, Traced, inputs_key
from fxpipe.tracing.verify.effects import least_samples, refuse_unwritable_inputs
from fxpipe.utils.accelerator import peek_seed
from fxpipe.utils.batch_split import samples_per_micro_batch
from fxpipe.utils.locks import planning_block
from fxpipe.utils.progress import show_progress
from fxpipe.utils.pytree import flatten, has_own_attributes

SizesOf: TypeAlias = Callable[[int], Sequence[int]]  # mini-batch -> sizes of its micro-batches
MAX_GRAPHS = 16  # limit for one model; the oldest is dropped
MANY_PYTHON_VALUES = 4  # values of one name that forward reads, before a warning
MANY_VALUE_GRAPHS = 8  # graphs that differ in values or sizes only, before a warning
ATTEMPTS = 2  # graphs that try to make a dimension dynamic: it may be fixed at one size only


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The flattened inputs of a call, and the key of its graphs."""

    call: ModelCall
    leaves: Sequence[Any]
    key: GraphKey
    seed: int
    checked: dict[int, tuple[Traced, bool]]  # by id, for all micro-batches of a step: a graph, if it is the model's now

    def samples_of(self, traced: Traced) -> int:
        """Returns the number of samples. Raises `ArgumentError` if there are none."""
        batch = traced.batch_of(self.leaves)
        if batch == 0:
            raise ArgumentError(
                "the inputs hold no samples (size 0 in the batch dimension); give at least one, or skip the step"
            )
        return batch

    def match(self, traced: Traced, sizes_of: SizesOf | None = None) -> bool:
        """Returns whether a graph fits these inputs, and micro-batches of the sizes that `sizes_of` returns."""
        if traced.key != self.key:
            return False
        if id(traced) not in self.checked:
            self.checked[id(traced)] = traced, traced.holds_for_model()
        return self.checked[id(traced)][1] and traced.holds_for_values(self.leaves, self.seed, sizes_of)

    def fit(self, traced: Traced, sizes_of: SizesOf | None = None, may_compare: bool = True) -> bool:
        """As `match`; compares graph and model if dynamic sizes are far from the sizes that were compared."""
        if not self.match(traced, sizes_of):
            return False
        lengths = traced.dynamic.lengths_of(self.leaves)
        if lengths is None or not traced.dynamic.is_far_from(lengths, traced.comparisons.lengths):
            return True
        return may_compare and passes.holds_for_lengths(traced, self.call.args, self.call.kwargs)


class CachedGraph(NamedTuple):
    """A graph, split into stages, and its program on devices."""

    prepared: PreparedGraph
    bound: BoundProgram
    modes: Mapping[nn.Module, bool]  # modes of modules that forward sets: `self.teacher.eval()`

    @property
    def traced(self) -> Traced:
        return self.prepared.traced


class MissingGraph(NamedTuple):
    """A call that needs a new graph."""

    call: ModelCall
    place: int  # index of the call
    total: int | None  # number of micro-batches, if the call is one of them; None for a mini-batch


class GraphCache(list[CachedGraph]):
    """The graphs of one model, oldest first."""

    has_warned = False

    def add(self, graph: CachedGraph) -> None:
        """Adds a graph; drops the oldest if there are too many. Warns once if each step may need another."""
        self.append(graph)
        del self[:-MAX_GRAPHS]
        if not self.has_warned and (message := self._warning(graph.traced)) is not None:
            self.has_warned = True
            warn_user(message)

    def _of_key(self, key: GraphKey) -> list[Traced]:
        return [graph.traced for graph in self if graph.traced.key == key]

    def size_conclusions(self, traced: Traced) -> list[str]:
        """Lists the lines at which forward concludes something else from the sizes of graphs that differ in these."""
        lines: dict[str, None] = {}
        for other in self._of_key(traced.key):
            lengths = traced.dynamic.lengths_of(other.leaves) if other is not traced else None
            if lengths is not None:
                failing = traced.failing_conditions(other.batch_of(other.leaves), lengths)
                lines |= dict.fromkeys(condition.where for condition in failing)
        return list(lines)

    def _warning(self, traced: Traced) -> str | None:
        """Returns the warning that each step may need another graph; None if there are not many like this one."""
        graphs, model = self._of_key(traced.key), type(traced.model).__name__
        seen = [
            {f"{guard.text} at {guard.where}": repr(guard.expected) for guard in other.guards.guards}
            for other in graphs
            if other.guards is not None and other.guards.guards and _sizes(other) == _sizes(traced)
            if [leaf.constant for leaf in other.leaves] == [leaf.constant for leaf in traced.leaves]
        ]
        if len(seen) > MANY_VALUE_GRAPHS:
            reads = [read for read in seen[-1] if len({answers.get(read) for answers in seen}) > 1]
            return (
                f"{len(seen)} graphs of {model} differ only in values that forward has read ({'; '.join(reads)}), and "
                "each other value takes the time to record another; keep them in tensors (torch.where, masks), take "
                "the reading outside forward, or keep the module that reads whole (leaf_modules=)"
            )
        states = [other.python_state for other in graphs]
        for name in {name for state in states if (name := state.changed())}:
            if (count := len({state.facts_of(name) for state in states})) > MANY_PYTHON_VALUES:
                return (
                    f"forward of {model} reads {name!r}{traced.python_state.line_of(name)}, which had {count} values "
                    "so far, and each other value takes the time to record another graph: pass it to forward as a "
                    "tensor, or keep it in a buffer (register_buffer) that you fill"
                )
        if traced.dynamic.fixed:  # sizes that cannot be dynamic distinguish them
            graphs = [other for other in graphs if other.dynamic.fixed]
            why = "; ".join(traced.reasons_of_fixed_sizes)
            remedy = "Let forward keep the size a size (tensor functions instead of loops), or pad to few sizes"
        elif traced.guards is not None and traced.guards.guards:
            return None  # a value that forward reads may distinguish them
        else:
            lines = self.size_conclusions(traced) if len(graphs) > MANY_VALUE_GRAPHS else []
            why = f"forward concludes something else from them at {'; '.join(lines)}" if lines else ""
            remedy = "Pad to few sizes, or to sizes of which the same holds (multiples of a window or stride)"
        if len(graphs) <= MANY_VALUE_GRAPHS or not why:
            return None
        return (
            f"{len(graphs)} graphs of {model} differ only in sizes of inputs, and each other size takes the time to "
            f"record another: {why}. {remedy}"
        )

    def dynamic_dims(self, inputs: GraphInputs) -> DynamicDims:
        """Returns the dimensions that had another size before, and may be dynamic in another graph."""
        known = [graph.traced for graph in self if graph.traced.key.inputs == inputs.key.inputs]
        tried = [traced.dynamic.fixed for traced in known if traced.key == inputs.key]
        fixed = {
            dim: why
            for dims in tried
            for dim, why in dims.items()
            if why.startswith(TOO_LONG) or sum(dim in d for d in tried) >= ATTEMPTS
        }
        seen = tuple(map(_sizes, known))
        sizes = {(dim, size) for of_one in seen for dim, size in of_one.items()}
        varying = {(place, dim) for (place, dim), size in sizes if inputs.leaves[place].shape[dim] != size}
        dynamic = {dim for traced in known for dim in traced.dynamic.formulas}
        return DynamicDims(frozenset((varying | dynamic) - fixed.keys()), seen, fixed)


def _sizes(traced: Traced) -> dict[InputDim, int]:
    """Returns the sizes of the recording, except the batch dimensions."""
    return {
        (place, dim): size
        for place, leaf in enumerate(traced.leaves)
        if leaf.is_tensor
        for dim, size in enumerate(leaf.shape)
        if dim != traced.in_dims[place]
    }


class Programs:
    """The programs of one model, with the plan that the first graph decides."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan | None):
        self.model, self.asked, self.given_plan = model, settings, plan
        self.settings = settings  # completed by planning
        self.plan: Plan | None = None
        self.first: PreparedGraph | None = None
        self.graphs = GraphCache()
        self.closed = False
        self._modes: dict[nn.Module, bool] = {}  # modes of all modules before the last recording
        self.checks_evaluation = plan is None  # predict, with the first plan, if evaluation will be refused
        self._chosen_for = (False, 0)  # (is training, samples) for which the number of micro-batches was chosen
        self._warned: set[str] = set()

    def warn_once(self, what: str, text: str) -> None:
        """Warns the first time of each kind of warning."""
        if what not in self._warned:
            self._warned.add(what)
            warn_user(text)

    def check_open(self) -> None:
        """Raises `StateError` if the pipe is closed."""
        if self.closed:
            raise StateError("the pipe is closed; make a new one with fxpipe.pipeline(model, ...)")

    def find(
        self, calls: Sequence[ModelCall], is_handed_over: bool = False, in_one: bool = True, seed: int | None = None
    ) -> GivenInputs:
        """Returns the inputs of a step, a mini-batch or micro-batches, with their programs; records missing graphs."""
        # `in_one`: forward and backward run in one step. `seed`: of the step; None: the next one of torch's generator.
        seed, graphs = peek_seed() if seed is None else seed, list[CachedGraph]()
        while isinstance(result := self.look_up(calls, is_handed_over, in_one, seed, graphs), MissingGraph):
            inputs = self._look_up_in_modes(calls, is_handed_over, in_one, seed)
            if inputs is not None:
                return inputs
            self.record(result, seed, graphs)
        return result

    def _look_up_in_modes(
        self, calls: Sequence[ModelCall], is_handed_over: bool, in_one: bool, seed: int
    ) -> GivenInputs | None:
        """Looks up a graph whose forward sets modes of modules itself, which `pipe.train()` has set back."""
        for modes in {frozenset(graph.modes.items()): graph.modes for graph in self.graphs if graph.modes}.values():
            before, inputs = {m: m.training for m, flag in modes.items() if m.training != flag}, None
            setting = [graph for graph in self.graphs if before and graph.modes == modes]
            try:
                for module in before:
                    module.training = modes[module]
                inputs = self.look_up(calls, is_handed_over, in_one, seed, [], among=setting) if setting else None
                if isinstance(inputs, GivenInputs):
                    return inputs
            finally:
                for module, flag in before.items() if not isinstance(inputs, GivenInputs) else ():
                    module.training = flag
        return None

    def find_known(self, call: ModelCall, seed: int) -> GivenInputs | None:
        """Finds a known graph without reading weights, which stages may update; None: none, or it must be compared."""
        result = self.look_up([call], False, True, seed, [], may_compare=False)
        return None if isinstance(result, MissingGraph) else result

    def look_up(
        self,
        calls: Sequence[ModelCall],
        is_handed_over: bool,
        in_one: bool,
        seed: int,
        graphs: list[CachedGraph],
        may_compare: bool = True,
        among: Sequence[CachedGraph] | None = None,
    ) -> GivenInputs | MissingGraph:
        """Returns the inputs of a step, or the first call without a graph. Appends to `graphs`, of the first calls."""
        # `may_compare`: graph and model may be compared, which reads the weights. `among`: these graphs; None: all.
        count = len(calls) if is_handed_over else None
        inputs = self._graph_inputs(calls, seed)
        if self.first is None:  # plan for the largest
            elements = [sum(x.numel() for x in one.leaves if isinstance(x, torch.Tensor)) for one in inputs]
            place = elements.index(max(elements))
            return MissingGraph(calls[place], place, count)
        for i in range(len(graphs), len(calls)):
            with note_of_micro_batch(i, count):
                known = sorted(
                    self.graphs if among is None else among, key=lambda one: not graphs or one is not graphs[-1]
                )
                graph = self._known(inputs[i], is_handed_over, known, may_compare)
            if graph is None:
                return MissingGraph(calls[i], i, count)
            graphs.append(graph)
        if is_handed_over:
            return self._given_micro_batches(graphs, inputs)
        (graph,), (own,) = graphs, inputs
        batch = own.samples_of(graph.traced)
        if self._may_choose_chunks(batch):
            if not may_compare:
                return MissingGraph(own.call, 0, None)
            self._choose_chunks(graph.traced, batch, own.call)
            if not graph.traced.holds_for(batch, self._sizes(batch), graph.traced.dynamic.lengths_of(own.leaves)):
                graphs.clear()
                return self.look_up(calls, is_handed_over, in_one, seed, graphs, among=among)
        return self._given_mini_batch(graph, own, in_one)

    def _known(
        self, inputs: GraphInputs, is_part: bool, graphs: Sequence[CachedGraph], may_compare: bool
    ) -> CachedGraph | None:
        """Returns the first of `graphs` for these inputs, which must fit their micro-batches, or None."""
        for graph in graphs:
            if is_part and graph.bound.update is not None:
                continue  # each of the caller's micro-batches changes state
            if inputs.fit(graph.traced, None if is_part else self._sizes, may_compare):
                return graph
        for graph in graphs if may_compare and not is_part else ():  # not yet compared for such micro-batches
            traced, args, kwargs = graph.traced, inputs.call.args, inputs.call.kwargs
            if inputs.fit(traced) and passes.holds_for_sizes(
                traced, args, kwargs, self._sizes(traced.batch_of(inputs.leaves)), self.settings
            ):
                return graph
        return None

    def _graph_inputs(self, calls: Sequence[ModelCall], seed: int) -> list[GraphInputs]:
        """Flattens the inputs of a step; raises if the pipe is closed, or inputs have no values."""
        self.check_open()
        flags, checked, inputs = module_flags(self.model), dict[int, tuple[Traced, bool]](), []
        for call in calls:
            leaves, spec = flatten((call.args, call.kwargs))
            if any(map(has_own_attributes, leaves)):
                input_leaves(self.model, call.args, call.kwargs)  # raises with the name of the input
            if not all(map(has_values, leaves)):
                raise ArgumentError(
                    "the inputs have no values (meta or fake tensors); fxpipe.plan takes such, a step cannot"
                )
            key = GraphKey(inputs_key(spec, leaves), flags, ThreadState.now())
            inputs.append(GraphInputs(call, leaves, key, seed, checked))
        return inputs

    def _given_mini_batch(self, graph: CachedGraph, inputs: GraphInputs, in_one: bool) -> GivenInputs:
        """Splits a mini-batch into micro-batches; raises if it cannot run."""
        traced, bound, leaves = graph.traced, graph.bound, inputs.leaves
        batch, lengths = inputs.samples_of(traced), traced.dynamic.lengths_of(leaves)
        if bound.moving_buffers and not in_one and not traced.holds_for(batch, (batch,), lengths):
            raise StateError(
                f"forward changes the buffer {bound.moving_buffers[0]!r} in evaluation, so the mini-batch must run in "
                "one micro-batch, and its graph is one of smaller ones: make another pipe with chunks=1, or keep the "
                "buffer as it is in evaluation"
            )
        refuse_unwritable_inputs(traced, leaves, in_one)
        count = 1 if bound.moving_buffers and not in_one else self.settings.micro_batches(batch)
        sizes = samples_per_micro_batch(batch, count)
        traced.refuse_uneven_outputs(batch, sizes)
        return GivenInputs.of_mini_batch(bound, leaves, sizes, inputs.call.target)

    def _given_micro_batches(self, graphs: Sequence[CachedGraph], inputs: Sequence[GraphInputs]) -> GivenInputs:
        """Returns the caller's micro-batches, with as few programs as their graphs allow."""
        different = {id(graph.bound): graph for graph in graphs}
        if len(different) > 1:  # use the graph that fits most of them for each that it fits
            covered = {k: [one.fit(graph.traced) for one in inputs] for k, graph in different.items()}
            best = max(covered, key=lambda key: sum(covered[key]))
            graphs = [different[best] if holds else own for own, holds in zip(graphs, covered[best], strict=True)]
        # If samples interact, or no dimension holds them, a loss is not a mean over samples: weights are equal.
        counts_samples = not any(graph.bound.is_whole or graph.bound.is_joint for graph in graphs)
        samples = []
        for i, (graph, one) in enumerate(zip(graphs, inputs, strict=True)):
            with note_of_micro_batch(i, len(inputs)):
                others = {
                    f"{leaf.path} of micro-batch {k}": value
                    for k, (other, more) in enumerate(zip(graphs, inputs, strict=True))
                    if k != i and graph.bound.program.written_inputs
                    for leaf, value in zip(other.traced.leaves, more.leaves, strict=True)
                }
                refuse_unwritable_inputs(graph.traced, one.leaves, in_one=True, others=others)
                samples.append(one.samples_of(graph.traced))
        if self.settings.in_dims is None:
            _refuse_unknown_weights([graph.traced for graph in graphs], samples)
        samples = samples if counts_samples else [1] * len(samples)
        bounds, targets = tuple(graph.bound for graph in graphs), tuple(one.call.target for one in inputs)
        return GivenInputs(bounds, [one.leaves for one in inputs], tuple(samples), targets, is_handed_over=True)

    def _sizes(self, batch: int) -> list[int]:
        return samples_per_micro_batch(batch, self.settings.micro_batches(batch))

    def _may_choose_chunks(self, batch: int) -> bool:
        """Returns whether to choose the number of micro-batches again, for a mini-batch larger than all before."""
        # After a mini-batch with gradients, mini-batches without gradients do not count.
        return "chunks" in self.asked.left and (torch.is_grad_enabled(), batch) > self._chosen_for

    def _choose_chunks(self, traced: Traced, batch: int, call: ModelCall) -> None:
        if self.plan is not None and batch != self.plan.batch:  # else already chosen
            with torch.inference_mode(False), torch.enable_grad():
                self.plan = with_best_chunks(self.plan, traced, batch, call.args, call.kwargs, self.settings)
            self.settings = replace(self.settings, chunks=self.plan.chunks)
        self._chosen_for = torch.is_grad_enabled(), batch

    def record(self, missing: MissingGraph, seed: int, graphs: list[CachedGraph]) -> None:
        """Records the graph of a call. If it is the next call without one, this appends the graph to `graphs`."""
        with note_of_micro_batch(missing.place, missing.total):
            graph = self.make_graph(missing.call, seed, missing.total)
        if missing.place == len(graphs):
            graphs.append(graph)

    @planning_block()
    def make_graph(self, call: ModelCall, seed: int, count: int | None = None) -> CachedGraph:
        """Records, splits and binds a graph; the first one decides the stages and the devices of parameters."""
        # `count`: number of micro-batches, if the call is one of them; None for a mini-batch.
        args, kwargs = call.args, call.kwargs
        self._check_values_to_record()
        self._modes = {module: module.training for module in self.model.modules()}
        try:
            graph = self._make_first_graph(call, seed, count) if self.first is None else None
            if graph is None:
                assert self.first is not None
                (inputs,) = self._graph_inputs([call], seed)
                dynamic = self.graphs.dynamic_dims(inputs)
                settings = self.settings if count is None else replace(self.settings, chunks=1)
                with show_progress(self.settings.progress):
                    graph = self.keep(prepare_additional_graph(self.first, args, kwargs, settings, seed, dynamic))
            refuse_other_answers(graph.traced.input_reads, flatten((args, kwargs))[0])
            return graph
        except Exception as error:
            leaves = input_leaves(self.model, args, kwargs)[0] if not isinstance(error, FxpipeError) else []
            sizes = {leaf.path: leaf.shape[0] for leaf in leaves if leaf.shape}
            if len({*sizes.values()}) > 1:
                error.add_note(
                    "fxpipe: inputs differ in dimension 0 "
                    f"({', '.join(f'{path}: {size}' for path, size in sizes.items())}); if it holds the batch, give "
                    "all the same number of samples"
                )
            raise

    def _make_first_graph(self, call: ModelCall, seed: int, count: int | None) -> CachedGraph | None:
        """Plans with a graph; returns None if the model runs in another mode now."""
        # It is planned for training, even if the first call only evaluates; a plan that was passed has its own mode.
        args, kwargs = call.args, call.kwargs
        with torch.inference_mode(False), torch.enable_grad(), show_progress(self.settings.progress):
            first = prepare(self.model, args, kwargs, self.settings, self.given_plan, seed, count)
            refusal = passes.refusal_of_evaluation(first, args, kwargs, seed) if self.checks_evaluation else None
        self.checks_evaluation = False
        graph = self.keep(self.take_plan_of(first))
        if refusal is not None:
            warn_user(
                f"{type(self.model).__name__} can be trained as a pipe, but its evaluation (model.eval(), "
                f"torch.no_grad(), inputs such as these) will be refused: {refusal}"
            )
        is_now = (graph.traced.flags, graph.traced.state) == (module_flags(self.model), ThreadState.now())
        return graph if is_now and graph.traced.holds_for_model() else None

    def take_plan_of(self, prepared: PreparedGraph) -> PreparedGraph:
        """Uses the plan of the first graph; returns the graph without the loss for planning and its example target."""
        settings = replace(prepared.settings, loss=None)
        self.first, self.plan = replace(prepared, settings=settings), prepared.plan
        self.settings, self.asked = settings, replace(self.asked, loss=None)
        return self.first

    def keep(self, prepared: PreparedGraph) -> CachedGraph:
        """Binds a graph to the devices, and adds it."""
        traced = prepared.traced
        traced.refuse_inference_mode()
        modes = {module: module.training for module, flag in self._modes.items() if module.training != flag}
        graph = CachedGraph(prepared, self.bind(prepared), modes)
        moving = graph.bound.moving_buffers
        least = max(self.settings.least_samples, least_samples(traced))
        self.settings = replace(self.settings, least_samples=least)
        if moving and self.settings.chunks > 1:
            warn_user(
                f"{type(self.model).__name__} changes the buffer {moving[0]!r} in evaluation, and each micro-batch "
                "would find what the one before has left: a call runs its mini-batch in one micro-batch, one stage "
                "after another. Keep the buffer as it is in evaluation (of quantization: disable_observer) for a "
                "pipeline"
            )
        if self.plan is not None and (new := [r for r in traced.reasons_of_fixed_sizes if r not in self.plan.why]):
            self.plan = replace(self.plan, why=(*self.plan.why, *new))
        self.graphs.add(graph)
        if traced.print_lines:
            places = ", ".join(traced.print_lines[:3]) + (", ..." if len(traced.print_lines) > 3 else "")
            self.warn_once(
                "prints",
                f"forward of {type(self.model).__name__} prints at {places}: this is shown once while the model is "
                "planned, and not in a step, which runs the graph of what forward computes; to print in each step, put "
                "a forward hook on a module inside (register_forward_hook), or keep the module that prints whole "
                "(leaf_modules=)",
            )
        return graph

    def bind(self, prepared: PreparedGraph) -> BoundProgram:
        traced, devices = prepared.traced, self.settings.devices
        requires_grad = {} if traced.effects is None else traced.effects.requires_grad
        used = {traced.handed_out[place] for one in traced.combinations for place in one.pieces}
        # Outputs from which the model itself computes values that require grad.
        used_outputs = frozenset(
            place
            for place, node in enumerate(traced.outputs)
            if isinstance(node, fx.Node) and (node in used or any(requires_grad.get(user) for user in node.users))
        )
        return BoundProgram(
            prepared.program,
            wire_program(prepared.program),
            devices,
            traced.in_dims,
            traced.handed_out_dims,
            traced.out_spec,
            traced.state,
            traced.constants,
            left_attribute_dims=traced.left_attribute_dims,
            overwritten=traced.overwritten,
            told=traced.told,
            combinations=tuple(one.on(devices[-1]) for one in traced.combinations),
            update=traced.update and traced.update.on(devices[-1]),
            known_pieces=InputValues.of_pieces(traced, devices[-1]) if traced.combinations else None,
            head=traced.head.on(devices[0]) if isinstance(traced.head, InputValues) else None,
            used_outputs=used_outputs,
            moving_buffers=_moving_buffers(prepared),
            is_whole=traced.is_whole,
            replicas=_replicas_of(prepared, self.settings),
        )

    def _check_values_to_record(self) -> None:
        """Raises `StateError` if the model has tensors without values."""
        if missing := names_without_values(self.model):
            raise StateError(
                f"the model has no values to run with: {missing[0]!r} is a meta or fake tensor; give it some first "
                "(fxpipe.distributed.load(pipe, path) reads a checkpoint; or load_state_dict(..., assign=True))"
            )


def _refuse_unknown_weights(graphs: Sequence[Traced], samples: Sequence[int]) -> None:
    """Raises `ArgumentError` if micro-batches may have other numbers of samples than their graphs suggest."""
    held = [(one, [place for place, dim in enumerate(one.in_dims) if dim is not None]) for one in graphs]
    # All rows of a tensor in a list may be of one sample.
    of_lists = any(_places_in_lists(one).issuperset(places) for one, places in held if places)
    if len({bool(places) for _, places in held}) > 1 or (of_lists and len({*samples}) > 1):
        names = dict.fromkeys(one.leaves[place].head for one, places in held for place in places)
        raise ArgumentError(
            f"micro-batches are weighted by samples, and whether {' and '.join(names)} has a row for each sample "
            f"cannot be told (the numbers would be {', '.join(map(str, samples))}); name the dimension of samples in "
            "in_dims of fxpipe.pipeline, or None for an input without; with None for all, the weights are equal"
        )


def _places_in_lists(traced: Traced) -> set[int]:
    """Returns the places of inputs that are in a list."""
    arguments = pytree.tree_unflatten([*range(len(traced.leaves))], traced.in_spec)
    parts = pytree.tree_leaves(arguments, is_leaf=lambda part: isinstance(part, list))
    return {place for part in parts if isinstance(part, list) for place in pytree.tree_leaves(part)}


def _replicas_of(prepared: PreparedGraph, settings: Settings) -> tuple[tuple[StageReplica, ...], ...]:
    """Returns the replicas of each stage, with code for their own devices; () if no stage has several."""
    if not settings.replica_workers:
        return ()
    by_stage = settings.stage_devices
    every = [tuple(own[turn % len(own)] for own in by_stage) for turn in range(max(map(len, by_stage)))]
    programs = [prepared.program]
    for turn, devices in enumerate(every[1:], 1):
        is_known = settings.compile is None and devices in every[:turn]  # compiled code belongs to one worker
        programs.append(programs[every.index(devices)] if is_known else prepared.on_devices(devices))
    return tuple(
        tuple(StageReplica(device, programs[turn].stages[j]) for turn, device in enumerate(own))
        for j, own in enumerate(by_stage)
    )


def _moving_buffers(prepared: PreparedGraph) -> tuple[str, ...]:
    """Returns the buffers that forward changes in evaluation, by samples or values, except batch norm's."""
    traced, stages = prepared.traced, prepared.program.stages
    carried, is_training = traced.carried_state, traced.flags[0][1]
    if is_training:
        return ()
    moving: set[fx.Node] = set()
    for node in traced.graph.nodes:
        is_source = node.op == "placeholder" or (node.op == "get_attr" and node.target in carried)
        if is_source or (info(node).recorded_size is None and not moving.isdisjoint(node.all_input_nodes)):
            moving.add(node)
    known = {name for stage in stages for name in (*stage.changed_at_end, *stage.counters, *stage.repeated)}
    written = (name for stage in stages for name in stage.changed_buffers if name not in {*carried, *known})
    return (*written, *(name for name, node in carried.items() if node in moving and name not in known))
