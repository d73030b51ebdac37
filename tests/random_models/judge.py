"""Runs a case as a pipeline, step after step, and says whether it is the plain model.

Two plain models say what is right. One runs on the whole mini-batch. The other runs on the micro-batches, one after the
other, with values of inputs read from the mini-batch, and losses put together by what they weigh: that is the other
right answer where micro-batches see what earlier ones left behind (running statistics, memory banks), are normalised by
themselves, or branch on values of their own; a size that depends on values of inputs may then be the mini-batch's or
each micro-batch's. So is all that is read by the lines that the pipeline runs as Python (modules kept whole, the rest
of a forward), and by no other line. Elsewhere the first one alone is right. What only a first call makes may be there
after planning; what it draws are other numbers than those of the judge.

Outputs, gradients, buffers, parameters, inputs and attributes are compared after each step. A step that is refused must
have changed nothing; its graph may have been planned, which leaves what only a first call makes.
"""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from helpers.devices import workers
from helpers.oracle import Seeded, draw_seed
from helpers.paths import module_at
from torch import Tensor, nn
from zoo.reference import flat, same_by_name, same_outputs

import fxpipe
from fxpipe.errors import FxpipeError, InternalError
from fxpipe.tracing.node_info import info
from fxpipe.utils.accelerator import mix_seed
from random_models.case import DOUBLED, Batch, Case, source

Inputs = dict[str, Tensor]
State = dict[str, dict[str, Any]]  # by kind and name


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str  # "right", "refused", "wrong", "crashes", "hangs", "invalid": torch itself does not run it
    detail: str = ""
    refused_steps: tuple[str, ...] = ()  # why, each


@dataclass(slots=True)
class Left:
    """What a step leaves behind."""

    outputs: Any = None
    error: Exception | None = None
    inputs: Inputs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Python:
    """What of a model a pipeline runs as the Python it is, for each micro-batch."""

    whole: tuple[str, ...] = ()  # paths of modules
    rest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of forward: path -> calls recorded before it
    lines: frozenset[int] = frozenset()  # of the program


Change = Callable[[nn.Module], None]


def judge(case: Case, spoil: Change | None = None) -> Verdict:
    """The verdict on a case. `spoil`: changes the model after each step of the pipeline, to test the judge itself."""
    with tempfile.TemporaryDirectory() as folder:
        plain = _module(source(case), Path(folder, "model.py"))
        oracle = _module(source(case, is_oracle=True), Path(folder, "oracle.py"))
        return Trial(case, plain, oracle, spoil).run()


def plain_model(case: Case) -> nn.Module:
    """The model of a case."""
    with tempfile.TemporaryDirectory() as folder:
        return _built(case, _module(source(case), Path(folder, "model.py")))


def plain_differences(case: Case) -> list[str]:
    """What differs between the two plain models after each step; empty where nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _Whole(case, _module(source(case), Path(folder, "model.py")))
        parts = _Parts(case, _module(source(case, is_oracle=True), Path(folder, "oracle.py")))
        texts = []
        for batch in case.batches:
            left = [_run(lambda inputs, c=c, b=batch: c.step(inputs, b, Python()), case, batch) for c in (whole, parts)]
            if errors := [one.error for one in left if one.error is not None]:
                raise errors[0]
            texts.append(_compared(case.tolerance, left[1], parts.model, left[0], whole))
        return texts


_numbers = itertools.count()


def _module(text: str, path: Path) -> ModuleType:
    path.write_text(text)
    return module_at(path, f"{path.stem}_{next(_numbers)}")


# -- inputs and losses -----------------------------------------------------------------------------------------------


class Tagged(Tensor):
    """A subclass of Tensor, as loaders of images make them."""


class Criterion:
    """A loss function whose reduction may change between steps."""

    is_sum = False

    def __call__(self, output: dict[str, Any]) -> Tensor:
        return loss_of(output) * (len(output["value"]) if self.is_sum else 1)


def make_inputs(case: Case, batch: Batch) -> Inputs:
    """The inputs of a mini-batch, of other sizes and magnitudes in each."""
    generator = torch.Generator().manual_seed(batch.seed)
    b, t = batch.samples, batch.length

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.3 + batch.seed % 3)

    labels = torch.randint(0, 3, (b, t), generator=generator)
    labels[torch.rand(b, t, generator=generator) < 0.3 * (batch.seed % 2)] = -100
    labels[:, 0] = 1
    made = {
        "x": normal(b, t, 4).as_subclass(Tagged if "subclass" in case.twists else Tensor),
        "ids": torch.randint(0, 1 + batch.seed % 3, (b, t), generator=generator),
        "state": normal(b, 4),
        "cache": normal(b, 9, 4),
        "labels": labels,
        "scale": torch.tensor(float(batch.seed % 4)),
        "total": (labels != -100).sum().float(),
    }
    made["x"].requires_grad_(case.input_gradient)
    return {name: made[name] for name in case.inputs}


def loss_of(output: dict[str, Any]) -> Tensor:
    """A mean over samples of every number, and the losses that the model takes itself."""
    leaves = [output["value"], *output["outputs"]]
    total = sum((leaf.square() + (k + 1) * leaf).mean() for k, leaf in enumerate(leaves))
    return total + sum((k + 1) * loss for k, loss in enumerate(output["losses"]))


# -- the two plain models --------------------------------------------------------------------------------------------


class _Whole:
    """The plain model on the mini-batch."""

    name = "the mini-batch"

    def __init__(self, case: Case, module: ModuleType):
        self.case, self.module, self.model = case, module, _built(case, module)

    def step(self, inputs: Inputs, batch: Batch, python: Python) -> Any:
        with _mode(self.model, batch):
            return self.model(**inputs)


class _Parts:
    """The plain model on micro-batches, one after the other."""

    name = "the micro-batches"

    def __init__(self, case: Case, module: ModuleType, own_sizes: bool = False):
        self.case, self.module, self.model = case, module, _built(case, module)
        self.own_sizes = own_sizes  # are sizes that depend on values of inputs those of each micro-batch?
        self.attributes: list[dict[str, Any]] = []

    def step(self, inputs: Inputs, batch: Batch, python: Python) -> Any:
        is_whole = batch.mode == "eval" and self._moves_state(inputs)
        count = 1 if is_whole else min(self.case.chunks, batch.samples)
        seed, outputs, weights = draw_seed(self.case.is_random), [], []
        self.attributes = []
        with _mode(self.model, batch), _deferred(self.model, self.case.deferred and batch.mode != "eval"):
            for i in range(count):
                part = {name: _part(name, value, count, i) for name, value in inputs.items()}
                for k in range(len(self.case.program)):
                    self.module.WHOLE[k] = part if k in python.lines else inputs
                    self.module.SIZED[k] = part if self.own_sizes or k in python.lines else inputs
                self.module.WEIGHTS.clear()
                with (
                    _SeededRest(mix_seed(seed, i)) as mode,
                    _as_one_node(self.model, python.whole, mode),
                    mode.rest_of(self.model, python.rest),
                ):
                    outputs.append(self.model(**part))
                weights.append([*self.module.WEIGHTS])
                self.attributes.append(attributes_of(self.model))
                _write_back(inputs, part, count, i)
        return _gathered(outputs, weights)

    def _moves_state(self, inputs: Inputs) -> bool:
        """Returns whether evaluation writes a buffer or an attribute: then the mini-batch is one micro-batch."""
        for k in range(len(self.case.program)):
            self.module.WHOLE[k] = self.module.SIZED[k] = inputs
        with torch.no_grad(), torch.random.fork_rng([]):
            model = _built(self.case, self.module).eval()
            for ours, theirs in zip(model.modules(), self.model.modules(), strict=True):
                ours._parameters.update(theirs._parameters)
                ours._buffers.update((name, value.clone()) for name, value in theirs._buffers.items())
                vars(ours).update((name, value.clone()) for name, value in _carried_attributes(theirs))
            held = _state_tensors(model)  # what is alive keeps its id
            before = [(id(tensor), tensor._version) for tensor in held]
            model(**{name: value.clone() for name, value in inputs.items()})
        return before != [(id(tensor), tensor._version) for tensor in _state_tensors(model)]


def _carried_attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that a call leaves for the next one, and not for each sample."""
    return [(name, v) for name, v in vars(module).items() if isinstance(v, Tensor) and v.ndim != 3]


def _state_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.buffers(), *(value for module in model.modules() for _, value in _carried_attributes(module))]


class _SeededRest(Seeded):
    """Also knows what is drawn in the rest of a forward, which is one random node behind the calls recorded before."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.is_rest = False
        self.state: Tensor | None = None  # to which the rest has come

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_rest or self.is_inside:
            return super().__torch_function__(func, types, args, kwargs)
        generator = torch.default_generator
        before = generator.get_state()
        if self.state is None:
            generator.manual_seed(mix_seed(self.seed, self.ordinal))
        else:
            generator.set_state(self.state)
        start, self.is_inside = generator.get_state(), True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_inside = False
            if not torch.equal(start, generator.get_state()):
                self.state = generator.get_state()
            generator.set_state(before)

    @contextmanager
    def rest_of(self, model: nn.Module, rest: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
        """A block in which forward of these modules is a rest, but for the calls recorded before it."""
        hooks = []

        def during(path: str, is_rest: bool, count: int | None = None) -> None:
            """In this module (the first `count` times) it is a rest, or it is not."""
            before: list[bool] = []
            calls = itertools.count()

            def enter(*_: Any) -> None:
                before.append(self.is_rest)
                if count is None or next(calls) < count:
                    self.is_rest = is_rest

            def leave(*_: Any) -> None:
                self.is_rest = before.pop()

            module = model.get_submodule(path)
            hooks.extend((module.register_forward_pre_hook(enter), module.register_forward_hook(leave)))

        for path, names in rest.items():
            during(path, True)
            for name in {*names}:
                during(f"{path}.{name}" if path else name, False, names.count(name))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def _as_one_node(model: nn.Module, paths: Sequence[str], mode: Seeded) -> Iterator[None]:
    modules = [model.get_submodule(path) for path in paths]

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with mode.one():
                return forward(*args, **kwargs)

        return call

    for module in modules:
        module.forward = wrapped(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _built(case: Case, module: ModuleType) -> nn.Module:
    torch.manual_seed(case.seed)
    model = module.M()
    assert isinstance(model, nn.Module)
    return model


@contextmanager
def _mode(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Training or evaluation, with gradients or without, for a block."""
    model.train(batch.mode != "eval")
    with torch.set_grad_enabled(batch.mode in ("call", "step")):
        yield


def _is_cut(name: str, value: Tensor) -> bool:
    return name not in ("scale", "total")


def _part(name: str, value: Tensor, count: int, i: int) -> Tensor:
    """A micro-batch of an input; in memory of its own, unless it is to have a gradient."""
    if not _is_cut(name, value):
        return value.clone()  # which all micro-batches read as it was
    part = value.tensor_split(count)[i]
    return part if value.requires_grad else part.clone()


def _write_back(inputs: Inputs, part: Inputs, count: int, i: int) -> None:
    with torch.no_grad():
        for name, value in inputs.items():
            if _is_cut(name, value) and not value.requires_grad:
                value.tensor_split(count)[i].copy_(part[name])
            elif not _is_cut(name, value) and i == count - 1:
                value.copy_(part[name])


def _gathered(outputs: list[Any], weights: list[list[Any]]) -> Any:
    def together(leaves: list[Tensor]) -> Tensor:
        return torch.cat(leaves)

    losses = []
    for k in range(len(outputs[0]["losses"])):
        values, factors = [o["losses"][k] for o in outputs], [w[k] for w in weights]
        if factors[0] is sum:
            losses.append(sum(values))
        elif isinstance(factors[0], tuple):
            losses.append(factors[0][0](together([value for _, value in factors])))
        else:
            pairs = [(v * f, f) for v, f in zip(values, factors, strict=True) if int(f)]
            losses.append(sum(v for v, _ in pairs) / sum(f for _, f in pairs))
    return {
        "value": together([o["value"] for o in outputs]),
        "outputs": [together(list(parts)) for parts in zip(*(o["outputs"] for o in outputs), strict=True)],
        "losses": losses,
    }


@contextmanager
def _deferred(model: nn.Module, is_on: bool) -> Iterator[None]:
    """Batch norm's running statistics are those of the mini-batch after a block."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)] if is_on else []
    before, seen = {m: copy.deepcopy(m) for m in norms}, {m: [] for m in norms}
    hooks = [m.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].detach().clone())) for m in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for m, alone in before.items():
        with torch.no_grad():
            alone(torch.cat(seen[m]))
        for name, buffer in alone.named_buffers():
            m._buffers[name] = buffer  # in new memory: backward may need what is in the old


# -- state -----------------------------------------------------------------------------------------------------------


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """The attributes that the models of cases give themselves, tensors and others, by path."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.rpartition("_")[2].isdigit() and not isinstance(value, nn.Module) and not callable(value):
                found |= {f"{path}.{name}{key}": leaf for key, leaf in flat(value) if value is not None}
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in found.items()}


def _numbers_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        "gradient": {name: p.grad for name, p in model.named_parameters()},
        "buffer": {name: b for name, b in model.named_buffers()},
        "parameter": {name: p.detach() for name, p in model.named_parameters()},
    }


def _copied(numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        kind: {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in values.items()}
        for kind, values in numbers.items()
    }


def state_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    return _copied(_numbers_of(model)) | {"attribute": attributes_of(model)}


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _difference(have: dict[str, Any], want: dict[str, Any], tolerance: float) -> str:
    for kind, values in want.items():
        if sorted(have[kind]) != sorted(values):
            return f"{kind}s: other names: {sorted({*have[kind]} ^ {*values})[:3]}"
        in_order = {name: have[kind][name] for name in values}
        if text := same_by_name(in_order, values, tolerance):
            return f"{kind} {text}"
    return ""


# -- a trial ---------------------------------------------------------------------------------------------------------


class Trial:
    def __init__(self, case: Case, plain: ModuleType, oracle: ModuleType, spoil: Change | None):
        self.case, self.plain, self.spoil = case, plain, spoil
        self.alive: list[Any] = [] if case.is_random else [_Whole(case, plain)]
        self.parts = [_Parts(case, oracle, own) for own in ((False, True) if case.reads_size else (False,))]
        if case.is_per_part or case.is_random:
            self.alive += self.parts
        self.criterion = Criterion()
        self.inputs: Inputs = {}  # of the step before, which a loader may fill again
        self.refusals: list[str] = []
        self.assemblies: list[Any] = []

    def run(self) -> Verdict:
        first = self.case.batches[0]
        if text := self._cannot_run(first):
            return Verdict("invalid", text)
        ours = _built(self.case, self.plain)
        ours.train(first.mode != "eval")
        before = state_of(ours)
        try:
            pipe = self._pipe(ours, first)
        except InternalError as error:
            return Verdict("crashes", f"planning: {_text(error)}")
        except FxpipeError as error:
            if text := self._changed_by_planning(state_of(ours), before, first):
                return Verdict("wrong", f"planning that is refused changes {text}")
            return Verdict("refused", f"planning: {_text(error)}")
        except Exception as error:
            if text := self._cannot_run(replace(first, mode="step")):
                return Verdict("invalid", text)  # plain torch evaluates it, and does not train it
            return Verdict("crashes", f"planning: {_text(error)}")
        with closing(pipe):
            self.assemblies = _noting_assemblies(pipe)
            if text := self._changed_by_planning(state_of(ours), before, first):
                return Verdict("wrong", f"planning changes {text}")
            if self.parts[0] not in self.alive and self.case.reading & _python(self.case, pipe).lines:
                self.alive += self.parts  # Python reads each micro-batch for itself
            for number, batch in enumerate((first, *self.case.batches)):
                verdict = self._batch(pipe, ours, batch)
                if verdict is not None:
                    return Verdict(
                        verdict.kind, f"step {number} ({batch.mode}): {verdict.detail}", tuple(self.refusals)
                    )
        return Verdict("right", "", tuple(self.refusals))

    def _changed_by_planning(self, after: State, before: State, batch: Batch) -> str:
        """What planning must not change: all but what only a first call makes, as that one makes it."""
        made = {
            kind: {k for k, v in values.items() if k not in before[kind] or _shape(v) != _shape(before[kind][k])}
            for kind, values in after.items()
        }
        if not any(made.values()):
            return _difference(after, before, 0.0)
        twin = _Whole(self.case, self.plain)
        if isinstance(self.alive[0], _Whole):
            twin.model = copy.deepcopy(self.alive[0].model)
        twin.step(make_inputs(self.case, batch), batch, Python())
        called = state_of(twin.model)
        if self.case.is_random:
            called = {
                kind: values | {k: after[kind][k] for k in made[kind] if _kind(values.get(k)) == _kind(after[kind][k])}
                for kind, values in called.items()
            }
        want = {kind: before[kind] | {k: called[kind].get(k) for k in made[kind]} for kind in before}
        return _difference(after, want, self.case.tolerance)

    def _cannot_run(self, batch: Batch) -> str:
        """What plain torch says on the mini-batch, where it does not run it."""
        try:
            left = _run(lambda inputs: _Whole(self.case, self.plain).step(inputs, batch, Python()), self.case, batch)
        except Exception as error:
            return _text(error)
        return _text(left.error) if left.error else ""

    def _pipe(self, model: nn.Module, first: Batch) -> fxpipe.Pipeline:
        case = self.case
        inputs = make_inputs(case, first)
        doubled = case.schedule in DOUBLED
        options: dict[str, Any] = {"stages_per_device": 2} if doubled else {}
        if case.by_hand:
            options["balance"] = [f"part_{number}" for number in case.by_hand]
        with torch.set_grad_enabled(first.mode in ("call", "step")):
            return fxpipe.pipeline(
                model,
                workers(case.stages),
                case.chunks,
                example_kwargs=inputs,
                schedule=case.schedule,
                checkpoint=case.checkpoint,
                deferred_batch_norm=case.deferred,
                hardware="h100",
                progress=False,
                **options,
            )

    def _batch(self, pipe: fxpipe.Pipeline, ours: nn.Module, batch: Batch) -> Verdict | None:
        """What is wrong with a step, if so."""
        models = {id(ours): (ours, self.plain)} | {id(c): (c.model, c.module) for c in self.alive}
        for model, module in models.values():
            with torch.no_grad():
                exec(self.case.changes(batch.seed), module.__dict__, {"model": model})
        report = self._verified(pipe, batch)
        before, random_state = state_of(ours), torch.get_rng_state()
        torch.manual_seed(batch.seed)
        self.inputs = self._filled_again(make_inputs(self.case, batch))
        have = _run(lambda inputs: self._pipe_step(pipe, inputs, batch), self.case, batch, pipe, self.inputs)
        if self.spoil is not None:
            self.spoil(ours)
        torch.set_rng_state(random_state)
        if have.error is not None:
            return self._failed(have, ours, before, batch)
        messages = []
        for candidate in [*self.alive]:
            torch.manual_seed(batch.seed)
            python = _python(self.case, pipe, self.assemblies[-1] if self.assemblies else None)
            want = _run(lambda inputs, c=candidate, p=python: c.step(inputs, batch, p), self.case, batch)
            text = _text(want.error) if want.error else _compared(self.case.tolerance, have, ours, want, candidate)
            if text:
                messages.append((candidate.name, text, want.error))
                self.alive.remove(candidate)
        if not self.alive:
            once = self.assemblies and getattr(self.assemblies[-1], "update", None)
            in_turn = self.case.is_random or {"count", "batch_norm"} & {line.name for line in self.case.program}
            if all(error is not None for *_, error in messages) or (once and in_turn):  # neither is right
                return Verdict("invalid", messages[0][1])
            return Verdict("wrong", "; ".join(f"{text} (as of {name})" for name, text, _ in messages))
        if report is not None and not report and isinstance(self.alive[0], _Whole):
            return Verdict("wrong", f"verify: a right step is wrong: {report}")
        if batch.updates and batch.mode in ("call", "step"):
            for model in (ours, *(candidate.model for candidate in self.alive)):
                _update(model)
        return None

    def _verified(self, pipe: fxpipe.Pipeline, batch: Batch) -> fxpipe.Verification | None:
        """What `fxpipe.verify` says of the drop-in on a mini-batch, of which it must leave no trace."""
        if batch.mode != "call" or self.case.is_per_part or self.case.is_random or self._cannot_run(batch):
            return None
        pipe.train()
        try:
            return fxpipe.verify(pipe, **make_inputs(self.case, batch))
        except FxpipeError:
            return None

    def _pipe_step(self, pipe: fxpipe.Pipeline, inputs: Inputs, batch: Batch) -> Any:
        pipe.train(batch.mode != "eval")
        if batch.mode == "step":
            if batch.seed % 3:  # another object; else the same, changed
                self.criterion = Criterion()
            self.criterion.is_sum = _is_sum(self.case, batch)
            loss_fn = (lambda output: self.criterion(output)) if "criterion" in self.case.twists else loss_of
            _, outputs = pipe.forward_backward(**inputs, loss_fn=loss_fn, return_outputs=True)
            return outputs
        with torch.set_grad_enabled(batch.mode == "call"):
            return pipe(**inputs)

    def _filled_again(self, inputs: Inputs) -> Inputs:
        """The tensors of the step before with other values, where they fit."""
        if "reused" not in self.case.twists:
            return inputs
        for name, value in inputs.items():
            last = self.inputs.get(name)
            if last is not None and last.shape == value.shape and not value.requires_grad:
                inputs[name] = last.copy_(value)
        return inputs

    def _failed(self, have: Left, ours: nn.Module, before: dict[str, Any], batch: Batch) -> Verdict | None:
        error = have.error
        assert error is not None
        if not isinstance(error, FxpipeError) or isinstance(error, InternalError):
            kinds = []
            for candidate in self.alive:
                torch.manual_seed(batch.seed)
                twin = copy.copy(candidate)
                twin.model = copy.deepcopy(candidate.model)
                failed = _run(lambda inputs, c=twin: c.step(inputs, batch, Python()), self.case, batch).error
                kinds.append(type(failed))
            return Verdict("invalid", _text(error)) if type(error) in kinds else Verdict("crashes", _text(error))
        self.refusals.append(_text(error))
        after = state_of(ours)
        if have.outputs is not None:  # refused in backward: forward has ended well, and left behind what it does
            text = same_by_name(after["gradient"], before["gradient"], 0.0)
            return Verdict("wrong", f"a refused backward changed gradient {text}") if text else Verdict("right")
        if text := self._changed_by_planning(after, before, batch):
            return Verdict("wrong", f"a step that was refused ({_text(error)[:160]}) changed {text}")
        want = make_inputs(self.case, batch)
        if text := same_by_name(have.inputs, want, 0.0):
            return Verdict("wrong", f"a step that was refused ({_text(error)[:160]}) changed input {text}")
        return None


def _compared(tolerance: float, have: Left, ours: nn.Module, want: Left, candidate: Any) -> str:
    """The first difference between a step of `ours` and one of a plain model."""
    if text := same_outputs(flat(_detached(have.outputs)), flat(_detached(want.outputs)), tolerance):
        return f"output {text}"
    if text := same_by_name(have.inputs, want.inputs, tolerance):
        return f"input {text}"
    gradients = ({k: v.grad if v.is_leaf else None for k, v in left.inputs.items()} for left in (have, want))
    if text := same_by_name(*gradients, tolerance):
        return f"gradient of input {text}"
    if text := _difference(_copied(_numbers_of(ours)), _copied(_numbers_of(candidate.model)), tolerance):
        return text
    ends = [attributes_of(candidate.model)]
    if isinstance(candidate, _Parts):
        ends.append(_joined(candidate.attributes))
    texts = [_difference({"attribute": attributes_of(ours)}, {"attribute": end}, tolerance) for end in ends]
    return "" if "" in texts else texts[0]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Attributes that hold the batch, of all micro-batches."""

    def joined(values: list[Any]) -> Any:
        is_batched = isinstance(values[-1], Tensor) and values[-1].ndim == 3
        return torch.cat(values) if is_batched else values[-1]

    return {name: joined([part[name] for part in parts if name in part]) for name in parts[-1]}


def _noting_assemblies(pipe: fxpipe.Pipeline) -> list[Any]:
    """Which graphs run, as they come; there may be one for each mode, length and answer."""
    find, noted = pipe._fxpipe.find, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = find(*args, **kwargs)
        noted.append(found.bound)
        return found

    pipe._fxpipe.find = noting  # type: ignore[method-assign]
    return noted


def _python(case: Case, pipe: fxpipe.Pipeline, assembly: Any = None) -> Python:
    """Of the graph that has run; before the first step, of that of planning."""
    prepared = next((g.prepared for g in pipe._fxpipe.graphs if g.bound is assembly), pipe._fxpipe.first)
    assert prepared is not None
    traced = prepared.traced
    found = [call for node in traced.graph.nodes if (call := info(node).opaque) and call.module is not None]
    paths = {call.path for call in found}
    recorded = {name for call in found if call.module == "" for name in call.calls_before or ()}  # calls of the model's
    rest = {call.path: call.calls_before for call in found if call.calls_before is not None}  # the last segment's

    def is_python(k: int) -> bool:
        path = f"part_{k}" if case.program[k].is_part else ""
        return path in paths or ("" in paths and path not in recorded)

    lines = frozenset(filter(is_python, range(len(case.program))))
    return Python(tuple(path for path in traced.whole if path not in rest), rest, lines)


def _is_sum(case: Case, batch: Batch) -> bool:
    """Is the loss of this step a sum over samples, and no mean?"""
    return "criterion" in case.twists and batch.mode == "step" and batch.seed % 2 == 1


def _run(
    step: Callable[[Inputs], Any],
    case: Case,
    batch: Batch,
    pipe: fxpipe.Pipeline | None = None,
    inputs: Inputs | None = None,
) -> Left:
    """A step, with backward where the batch wants one; `forward_backward` of a pipe has run it."""
    inputs = make_inputs(case, batch) if inputs is None else inputs
    left = Left(inputs=inputs)
    try:
        left.outputs = step(inputs)
        if batch.mode == "call" or (batch.mode == "step" and pipe is None):
            (loss_of(left.outputs) * (batch.samples if _is_sum(case, batch) else 1)).backward()
    except Exception as error:
        left.error = error
    return left


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad.clamp(-1, 1), alpha=-0.05)
                parameter.grad = None


def _detached(output: Any) -> Any:
    return {
        "value": output["value"].detach(),
        "outputs": [value.detach() for value in output["outputs"]],
        "losses": [value.detach() for value in output["losses"]],
    }


def _text(error: BaseException | None) -> str:
    notes = "".join(f" | {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"[:2000]
