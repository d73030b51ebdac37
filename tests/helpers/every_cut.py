"""A model cut at chosen places, without planning, and compared with the plain model: for tests that try every cut."""

import copy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.wiring import wire_program
from fxpipe.scheduling import make_schedule
from fxpipe.scheduling.actions import Rows, Schedule
from fxpipe.tracing import trace
from fxpipe.tracing.node_info import info
from fxpipe.utils.accelerator import mix_seed
from fxpipe.utils.batch_split import samples_per_micro_batch
from helpers.oracle import Seeded, draw_seed, parts_of
from helpers.tried_orders import InterleavedExecutor


class WithGrad(InterleavedExecutor):
    """Like a worker's thread, whatever the thread of the caller (autograd's own, in a backward) has set."""

    def run(self, step: Any, rows: Rows) -> None:
        with torch.enable_grad():
            super().run(step, rows)


CPU = torch.device("cpu")


def loss_of(output: Any, target: Any = None) -> torch.Tensor:
    """A mean over samples of every floating point leaf."""
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum((k + 1) * (x.float().square().mean() + x.float().mean()) for k, x in enumerate(leaves))


@dataclass
class Result:
    outputs: list[Any]  # leaves of the whole mini-batch
    gradients: dict[str, torch.Tensor | None]  # of parameters by name, of inputs by place
    buffers: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]  # leaves of the whole mini-batch, after it


class EveryCut:
    """Traces `model` once. `check` runs it with stages that begin at `starts`, and compares it with the plain model."""

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        chunks: int = 3,
        loose: tuple[str, ...] = (),
        tolerance: float = 1e-5,
        leaf_modules: tuple[str, ...] = (),
    ):
        self.model, self.args, self.loose, self.tolerance = model, args, loose, tolerance
        self.traced = trace(model, args, chunks=chunks, leaf_modules=leaf_modules)
        self.forbidden_cuts = forbidden_cuts(self.traced)
        self.batch = self.traced.batch_of(pytree.tree_leaves((args, {})))
        self._wanted: dict[Any, Result] = {}

    @property
    def allowed(self) -> list[int]:
        return [place for place in range(1, len(self.traced.nodes)) if place not in self.forbidden_cuts]

    def cuts(self, stages: int, every: int = 1) -> list[tuple[int, ...]]:
        """Every `every`-th way to cut into so many stages."""
        return [(0, *places) for places in list(combinations(self.allowed, stages - 1))[::every]]

    def place(self, name: str) -> int:
        return [n.name for n in self.traced.nodes].index(name)

    def program(self, starts: tuple[int, ...]) -> Any:
        return split_into_stages(self.traced, starts, [CPU] * len(starts))

    def check(
        self, starts: tuple[int, ...], chunks: int, schedule: str, checkpoint: str = "never", seed: int = 0
    ) -> None:
        """`schedule`: "1f1b" or "gpipe", of forward_backward, or "drop-in": a call, and backward from its loss."""
        program = self.program(starts)
        where = (
            f"cut before {[self.traced.nodes[s].name for s in starts[1:]]}, {chunks} chunks, {schedule}, {checkpoint}"
        )
        seen = [name for stage in program.stages for name in stage.attributes]
        loose = {name for name in seen if seen.count(name) > 1} | {*self.loose}
        want, have = self._want(chunks, schedule), self._have(program, chunks, schedule, checkpoint, seed)
        if schedule == "drop-in":
            for place, (w, h) in enumerate(zip(want.outputs, have.outputs, strict=True)):
                assert torch.equal(w, h), f"output {place} differs, {where}"
        assert list(want.gradients) == list(have.gradients)
        for name, gradient in want.gradients.items():
            assert (gradient is None) == (have.gradients[name] is None), f"gradient of {name}: one is missing, {where}"
            if gradient is not None:
                tolerance = self.tolerance if name in loose else 0.0
                torch.testing.assert_close(
                    have.gradients[name],
                    gradient,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda m, n=name: f"gradient of {n}, {where}: {m}",
                )
        for name, value in want.buffers.items():
            assert torch.equal(have.buffers[name], value), f"buffer {name} differs, {where}"
        for place, (w, h) in enumerate(zip(want.inputs, have.inputs, strict=True)):
            assert torch.equal(w, h), f"what is left in input {place} differs, {where}"

    def schedule(self, name: str, stages: int, m: int, checkpoint: str) -> Schedule:
        return make_schedule(name, stages, m, checkpoint)

    # -- both sides --------------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[Any, ...]:
        def own(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

        return pytree.tree_map(own, self.args)

    def _result(
        self, model: nn.Module, args: tuple[Any, ...], outputs: list[Any], inputs: list[torch.Tensor]
    ) -> Result:
        leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.requires_grad]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {f"input {place}": x.grad for place, x in enumerate(leaves)}
        return Result(outputs, gradients, {name: b.clone() for name, b in model.named_buffers()}, inputs)

    def _is_random(self) -> bool:
        return any(info(n).is_random for n in self.traced.nodes)

    def _want(self, chunks: int, schedule: str) -> Result:
        if (chunks, schedule) not in self._wanted:
            self._wanted[chunks, schedule] = self._plain(chunks, schedule)
        return self._wanted[chunks, schedule]

    def _plain(self, chunks: int, schedule: str) -> Result:
        model, args, m = copy.deepcopy(self.model), self._inputs(), min(chunks, self.batch)
        torch.manual_seed(5)
        seed = draw_seed(self._is_random())
        made, left = [], []
        # Products of matrices may come out with other bits where memory begins elsewhere: a part that nobody writes to
        # is a part of the mini-batch's memory, as it is for a stage.
        writes = set().union(*self.traced.effects.written_classes)
        is_written = any(self.traced.effects.alias[n] in writes for n in self.traced.placeholders.values())
        for i, part in enumerate(parts_of(args, m, self.batch)):
            with Seeded(mix_seed(seed, i)):
                given = pytree.tree_map_only(torch.Tensor, torch.clone, part) if is_written else part
                made.append(model(*given))
                left.append([x.detach() for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)])
        leaves = [pytree.tree_leaves(output) for output in made]
        outputs = [torch.cat([x.detach() for x in parts]) for parts in zip(*leaves, strict=True)]
        if schedule == "drop-in":
            roots = [x.detach().requires_grad_(x.is_floating_point()) for x in outputs]
            found = torch.autograd.grad(loss_of(roots), [r for r in roots if r.requires_grad])
            sizes = [self.batch // m + (i < self.batch % m) for i in range(m)]
            split_up = iter([g.split(sizes) for g in found])
            parts = [next(split_up) if r.requires_grad else None for r in roots]
            for i in reversed(range(m)):
                given = [(x, p[i]) for x, p in zip(leaves[i], parts, strict=True) if p is not None and x.requires_grad]
                torch.autograd.backward([x for x, _ in given], [g for _, g in given])
        else:
            sizes = [self.batch // m + (i < self.batch % m) for i in range(m)]
            losses = [loss_of(output) * (size / self.batch) for output, size in zip(made, sizes, strict=True)]
            for loss in losses if schedule == "1f1b" else reversed(losses):
                loss.backward()
        dims = [dim for leaf, dim in zip(self.traced.leaves, self.traced.in_dims, strict=True) if leaf.is_tensor]
        inputs = [parts[0] if dim is None else torch.cat(parts, dim) for dim, *parts in zip(dims, *left, strict=True)]
        return self._result(model, args, outputs, inputs)

    def _have(self, program: Any, chunks: int, schedule: str, checkpoint: str, seed: int) -> Result:
        model, args, traced = copy.deepcopy(self.model), self._inputs(), self.traced
        devices, m = (CPU,) * len(program.stages), min(chunks, self.batch)
        assembly = BoundProgram(
            program,
            wire_program(program),
            devices,
            traced.in_dims,
            traced.out_dims,
            traced.out_spec,
            traced.state,
            traced.constants,
            left_attribute_dims=traced.left_attribute_dims,
        )
        engine = Engine(model, WithGrad(seed))
        leaves = pytree.tree_leaves((args, {}))
        given = GivenInputs.of_mini_batch(assembly, leaves, samples_per_micro_batch(self.batch, m))
        outputs: list[Any] = []
        torch.manual_seed(5)
        if schedule == "drop-in":
            output = engine.call(given, make_schedule("gpipe", len(devices), m, checkpoint))
            outputs = [x.detach() for x in pytree.tree_leaves(output)]
            loss_of(output).backward()
        else:
            plan = self.schedule(schedule, len(devices), m, checkpoint)
            engine.forward_backward(given, plan, LossCall(loss_of))
        inputs = [x.detach() for x in leaves if isinstance(x, torch.Tensor)]
        return self._result(model, args, outputs, inputs)
