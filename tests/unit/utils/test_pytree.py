"""Inputs, outputs and targets of any structure: what a user has goes in as it is, and what forward makes comes out."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import closing
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import ArgumentError, TraceError
from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.program import ConstantOutput
from fxpipe.utils import pytree as trees

Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    a: Any
    b: Any = None
    made: int = field(default=0, init=False)

    def __post_init__(self):
        type(self).count = getattr(type(self), "count", 0) + 1
        self.made = 7


@dataclass(frozen=True)
class Frozen:
    a: Any
    rest: list[Any] = field(default_factory=list)

    def __post_init__(self):
        object.__setattr__(self, "extra", {"of": self.a})


@dataclass(frozen=True, slots=True)
class Slots:
    a: Any
    b: Any = 3


@dataclass(frozen=True, slots=True)
class MoreSlots(Slots):
    c: Any = None


@dataclass
class Output(OrderedDict):
    """As in transformers, but unknown to torch."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        for each in dataclasses.fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)


class Numbered(list):
    def __init__(self, number, items):
        super().__init__(items)
        self.number = number


class Strict:
    """Its attributes may not be set, and it has slots and others."""

    __slots__ = ("_Strict__hidden", "__dict__", "unset")

    def __init__(self, a, b):
        vars(self)["a"] = a
        object.__setattr__(self, "_Strict__hidden", b)

    def __setattr__(self, name, value):
        raise AttributeError(name)

    @property
    def hidden(self):
        return self.__hidden


def parts(value: Any, of_tensor: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    """A value as plain containers, and with the types of all objects."""

    def inner(part: Any) -> Any:
        return parts(part, of_tensor)

    if isinstance(value, torch.Tensor):
        return ("tensor", of_tensor(value))
    if isinstance(value, Strict):
        return Strict, inner(vars(value)), inner(value.hidden)
    if isinstance(value, Slots):
        return type(value), [inner(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, type):
        return value
    own = inner(vars(value)) if hasattr(value, "__dict__") else None
    if isinstance(value, dict):
        return type(value), [(key, inner(item)) for key, item in value.items()], own
    if isinstance(value, (list, tuple)):
        return type(value), [inner(item) for item in value], own
    return (type(value), own) if own is not None else value


T, U = torch.arange(3.0), torch.arange(4.0)
TREES = {
    "leaf": T,
    "none": None,
    "plain": [T, (None, True, 3, 2.5, "text"), {"x": U}],
    "dicts": [OrderedDict(b=T, a=U), defaultdict(list, x=[T])],
    "named tuple": Pair(T, [Pair(1, U)]),
    "dataclass": Plain(T, {"x": Plain(U)}),
    "frozen": Frozen(T, [U, Frozen(1)]),
    "slots": [Slots(T), (MoreSlots(T, None, Slots(U)),)],
    "dict and dataclass": Output(logits=T),
    "shape": [torch.Size([2, 3])],
}


@pytest.mark.parametrize("name", TREES)
def test_there_and_back(name):
    tree = TREES[name]
    leaves, spec = trees.flatten(tree)
    again = pytree.tree_unflatten(leaves, spec)
    assert parts(again) == parts(tree)
    assert trees.flatten(again)[1] == spec
    assert trees.leaves_by_structure(tree, spec) == leaves
    assert not any(dataclasses.is_dataclass(leaf) for leaf in leaves)


@pytest.mark.parametrize(
    "tree", [Numbered(3, [T, U]), Strict(T, [U]), UserDict(x=T), SimpleNamespace(a=[Strict(T, 2)])]
)
def test_objects_of_an_output(tree):
    leaves, spec = trees.flatten_output(tree, lambda leaf: leaf is T)
    assert parts(pytree.tree_unflatten(leaves, spec)) == parts(tree)
    assert trees.leaves_by_structure(tree, spec) == leaves
    leaves, spec = trees.flatten_output(tree, lambda leaf: False)
    assert leaves == [tree]
    assert leaves[0] is tree


def test_nothing_runs_again_and_nothing_is_registered():
    known, plain = set(pytree.SUPPORTED_NODES), Plain(T)
    count = Plain.count
    leaves, spec = trees.flatten(plain)
    pytree.tree_unflatten(leaves, spec)
    assert Plain.count == count
    assert set(pytree.SUPPORTED_NODES) == known
    assert pytree.tree_leaves(plain) == [plain]


@pytest.mark.parametrize("make", [list, dict, lambda: Plain(T), Output])
def test_what_holds_itself_is_refused(make):
    tree = make()
    if isinstance(tree, list):
        tree.append(tree)
    elif isinstance(tree, Plain):
        tree.b = [tree]
    else:
        tree["x"] = tree
    with pytest.raises(ArgumentError, match="holds itself"):
        trees.flatten([tree])


def test_broadcasting():
    spec = trees.flatten([T, {"x": T, "y": T}, Plain(T, T)])[1]
    assert trees.broadcast_prefix("mean", spec) == ["mean"] * 6
    assert trees.broadcast_prefix([0, {"y": None, "x": "mean"}, 1], spec) == [0, "mean", None, 1, 1, 1]
    assert trees.broadcast_prefix([0, 1, Plain(2, 3)], spec)[:5] == [0, 1, 1, 2, 3]
    assert trees.broadcast_prefix([0, {"x": 1}, {"b": 2}], spec)[:3] == [0, 1, trees.UNNAMED]
    for wrong in ([0, 1], (0, 1, 2), [0, {"z": 1}, 2], [[0], 1, 2], [0, 1, {"c": 1}], [0, 1, Plain(2, [3])]):
        with pytest.raises(trees.StructureError):
            trees.broadcast_prefix(wrong, spec)


def test_a_field_that_an_output_of_transformers_has_in_other_calls_is_no_mistake():
    pytree.register_pytree_node(Output, lambda o: ([*o.values()], [*o]), lambda leaves, keys: Output(*leaves))
    try:
        spec = trees.flatten(Output(logits=T))[1]
        assert trees.broadcast_prefix({"loss": "mean"}, spec) == [trees.UNNAMED]
        with pytest.raises(trees.StructureError, match="it has no 'lost', but 'logits'"):
            trees.broadcast_prefix({"lost": "mean"}, spec)
    finally:
        pytree._deregister_pytree_node(Output)


# -- through a pipe --------------------------------------------------------------------------------------------------


class Layer:
    def __init__(self):
        self.keys, self.device, self.seen = None, None, 0

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.seen += keys.shape[1]
        self.device = keys.device
        return self.keys


CONFIG = SimpleNamespace(scale=2.0)


class Cache:
    """As in transformers: objects in lists in an object, beside a configuration, and a class to make more."""

    def __init__(self, config):
        self.layers, self.config, self.kind, self.by_name = [], config, Layer, {}

    def update(self, keys, layer):
        while len(self.layers) <= layer:
            self.layers.append(self.kind())
            self.by_name[layer] = self.layers[-1].seen
        return self.layers[layer].update(keys)


class Model(Layered, one=4, two=4):
    """Two layers; `forward` makes an output of them."""

    def forward(self, *args, **kwargs):
        return self.made(self, *args, **kwargs)


def x(samples: int = 5) -> torch.Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))


def pair_of(forward, **options):
    model = Model(made=forward)
    return closing(fxpipe.pipeline(copy.deepcopy(model), ["cpu", "cpu"], 2, **options)), model


def graphs_of(pipe) -> int:
    return len(pipe._fxpipe.graphs)


def tensors(value: Any) -> list[torch.Tensor]:
    leaves, _ = trees.flatten_output(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_same(have: Any, want: Any) -> None:
    """Equal values in equal structures of equal types."""
    assert parts(have, lambda tensor: tensor.requires_grad) == parts(want, lambda tensor: tensor.requires_grad)
    torch.testing.assert_close(tensors(have), tensors(want))


def cached(model, x, cache=None):
    cache = Cache(CONFIG) if cache is None else cache
    h = cache.update(torch.tanh(model.one(x)), 0) * cache.config.scale
    return Plain(cache.update(model.two(h), 1), cache)


OUTPUTS = {
    "dataclass": lambda m, x: Plain(m.two(m.one(x)), {"h": [m.one(x), None, 3]}),
    "frozen": lambda m, x: Frozen(m.two(m.one(x)), [Frozen(m.one(x)), "text"]),
    "slots": lambda m, x: [Slots(m.two(m.one(x)), (m.one(x), True))],
    "dict and dataclass": lambda m, x: Output(m.two(m.one(x)).square().mean(), m.one(x)),
    "named tuple": lambda m, x: Pair(m.two(m.one(x)), OrderedDict(b=m.one(x), a=None)),
    "cache": cached,
    "list with attributes": lambda m, x: Numbered(m.one(x), [m.two(m.one(x)), 3]),
    "strict": lambda m, x: [Numbered(3, [m.two(m.one(x))]), UserDict(h=m.one(x))],
    "distribution": lambda m, x: torch.distributions.Normal(m.two(m.one(x)), 1.0, validate_args=False),
    "shape": lambda m, x: (m.two(m.one(x)), x.shape, SimpleNamespace(size=x.numel())),
    "returned twice": lambda m, x: (lambda y: {"a": y, "view": y.view(-1, 2, 2), "again": [y]})(m.two(m.one(x))),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_the_models(name):
    closing_pipe, model = pair_of(OUTPUTS[name])
    with closing_pipe as pipe:
        for samples in (5, 2, 7):
            have, want = pipe(x(samples)), model(x(samples))
            assert_same(have, want)
            for output in (have, want):
                sum(t.square().sum() for t in tensors(output) if t.requires_grad).backward()
        assert graphs_of(pipe) == 1
        for ours, plain in zip(pipe.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad)


def test_an_object_is_new_in_each_call_and_what_it_refers_to_is_not():
    closing_pipe, _ = pair_of(cached)
    with closing_pipe as pipe:
        first, second = pipe(x()).b, pipe(x()).b
        assert first.config is second.config is CONFIG
        assert first.layers[0] is not second.layers[0]
        first.update(torch.ones(5, 2), 0)
        first.by_name[5] = 1
        assert second.layers[0].keys.shape == (5, 4)
        assert pipe(x()).b.by_name == {0: 0, 1: 0}
        assert pipe(x()).b.layers[0].seen == 4


def test_a_registered_output_goes_by_its_own_functions():
    class Known(Plain):
        pass

    pytree.register_pytree_node(Known, lambda k: ([k.a], "context"), lambda leaves, _: Known(*leaves, "rebuilt"))
    try:
        closing_pipe, model = pair_of(lambda m, x: [Known(m.two(m.one(x)))])
        with closing_pipe as pipe:
            (have,) = pipe(x())
            assert type(have) is Known
            assert have.b == "rebuilt"
            torch.testing.assert_close(have.a, model(x())[0].a)
    finally:
        pytree._deregister_pytree_node(Known)


def test_a_device_in_the_output_is_that_of_the_outputs():
    traced = fxpipe.trace(Model(made=cached), (x(),))
    last = torch.device("cuda", 1)
    outputs = split_into_stages(traced, (0, 2), [x().device, last]).outputs
    assert [o.value for o in outputs if isinstance(o, ConstantOutput)].count(last) == 2


def test_an_output_that_holds_itself_is_refused():
    def forward(model, x):
        cache = Cache(CONFIG)
        cache.update(model.one(x), 0)
        cache.layers[0].owner = cache
        return cache

    with pytest.raises(TraceError, match=r"the model returns .* a Cache holds itself .*owner"):
        fxpipe.trace(Model(made=forward), (x(),))


def test_out_dims_as_the_output_is():
    def forward(model, x):
        return Plain(model.one(x).sum(0), {"y": [model.two(x).T, model.two(x).mean()]})

    model = Model(made=forward)
    for out_dims in (Plain("sum", {"y": [1, "mean"]}), Plain("sum", {"y": [-1, "mean"]})):
        found = fxpipe.trace(model, (x(),), out_dims=out_dims).out_dims
        assert [dim for dim in found if dim is not None] == ["sum", 1, "mean"]
    with pytest.raises(ArgumentError, match=r"does not fit the output.*: a Slots stands where a dict was"):
        fxpipe.trace(model, (x(),), out_dims=Plain("sum", Slots(1)))


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_inputs_of_any_structure():
    def forward(model, batch, more=None, *, flags=None):
        h = model.one(batch.a) + batch.rest[0]["h"] * flags["scale"]
        return model.two(h) if more is None else model.two(h) + more.left

    def inputs(samples):
        return Frozen(x(samples), [{"h": x(samples) + 1}, None, "text"]), Pair(x(samples), 3)

    closing_pipe, model = pair_of(forward)
    with closing_pipe as pipe:
        for samples in (5, 2):
            batch, more = inputs(samples)
            torch.testing.assert_close(
                pipe(batch, more=more, flags={"scale": 2}), model(batch, more=more, flags={"scale": 2})
            )
        assert [leaf.path for leaf in pipe._fxpipe.first.traced.leaves] == [
            "args[0].a", "args[0].rest[0]['h']", "args[0].rest[1]", "args[0].rest[2]", "args[0].extra['of']",
            "more.left", "more.right", "flags['scale']",
        ]  # fmt: skip


class Encoding(UserDict):
    """As the batches of tokenizers are: its texts are of one batch, and of no matter to a model."""

    def __init__(self, data, texts):
        super().__init__(data)
        self.texts, self.kind = texts, "text"


class View(Mapping):
    def __init__(self, data):
        self.all = data

    def __getitem__(self, key):
        return self.all[key]

    def __iter__(self):
        return iter(self.all)

    def __len__(self):
        return len(self.all)


MAPPINGS = {
    "a subclass of UserDict": lambda data: Encoding(data, [object()]),
    "UserDict": UserDict,
    "a view of a dict": MappingProxyType,
    "a class with the methods": View,
    "OrderedDict": OrderedDict,
    "transformers": lambda data: pytest.importorskip("transformers").BatchEncoding(data),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_one_input(name):
    make = MAPPINGS[name]
    kinds = set()

    def forward(model, batch):
        kinds.add((type(batch), getattr(batch, "kind", None)))
        return model.two(model.one(batch["h"])) * batch["scale"]

    closing_pipe, model = pair_of(forward)
    with closing_pipe as pipe:
        for samples in (5, 5, 2):
            inputs = {"h": x(samples), "scale": torch.arange(1.0, samples + 1)[:, None]}
            torch.testing.assert_close(pipe(make(inputs)), model(make(inputs)))
            assert len(pipe._fxpipe.graphs) == 1
        assert len(kinds) == 1
        if name != "a class with the methods":
            assert [leaf.path for leaf in pipe._fxpipe.first.traced.leaves] == ["args[0]['h']", "args[0]['scale']"]
        torch.testing.assert_close(
            pipe(make({"scale": torch.ones(3, 1), "h": x(3)})), model(make({"h": x(3), "scale": torch.ones(3, 1)}))
        )


def test_another_signature_is_another_graph_and_known_ones_are_kept():
    def forward(model, x, mask=None, scale=1, mode="a", **more):
        h = model.one(x) * scale
        if mask is not None:
            h = h * mask
        h = torch.relu(h) if mode == "a" else torch.tanh(h)
        return model.two(h + more["bias"] if "bias" in more else h) if scale is not True else h

    calls: list[Any] = [
        {}, {"mask": None}, {"mask": x() > 0}, {"mask": x()}, {"scale": 2}, {"scale": True}, {"scale": 2.0},
        {"mode": "b"}, {"bias": x()}, {"bias": torch.ones(5, 1), "mask": x() > 0},
    ]  # fmt: skip
    closing_pipe, model = pair_of(forward)
    with closing_pipe as pipe, torch.no_grad():
        for _ in range(2):
            for kwargs in calls:
                torch.testing.assert_close(pipe(x(), **kwargs), model(x(), **kwargs))
            torch.testing.assert_close(pipe(x(), None, 2), model(x(), None, 2))
        assert graphs_of(pipe) == len(calls) + 2  # and the one without gradients, that of the plan


class Options:
    def __init__(self, **given):
        vars(self).update(given)


def test_an_object_without_tensors_is_looked_at():
    """It may be another one in each call, or change between two."""

    def forward(model, x, options):
        assert type(options) is Options
        return model.two(torch.relu(model.one(x)) if options.inner["relu"] else model.one(x)) * options.scale

    closing_pipe, model = pair_of(forward)
    options = Options(scale=2, inner={"relu": True})
    with closing_pipe as pipe:
        for count, change in enumerate(({}, {"scale": 3}, {"inner": {"relu": False}}, {"new": None}), 1):
            vars(options).update(change)
            for samples in (5, 3):
                torch.testing.assert_close(pipe(x(samples), options), model(x(samples), options))
            assert graphs_of(pipe) == count
        options.inner["relu"] = True
        torch.testing.assert_close(pipe(x(), options), model(x(), options))
        assert graphs_of(pipe) == 5


def test_forward_gets_the_object_itself():
    missing, special = object(), Options(name="special")

    def forward(model, x, y, options):
        return model.two(model.one(x) * (1 if y is missing else 2)) * (3 if options is special else 4)

    closing_pipe, model = pair_of(forward)
    with closing_pipe as pipe:
        for y, options in ((missing, special), (object(), special), (missing, Options(name="special"))):
            torch.testing.assert_close(pipe(x(), y, options), model(x(), y, options))


@pytest.mark.parametrize("fails", [False, True])
def test_an_object_that_forward_fills_is_refused_and_stays_as_it_was(fails):
    def forward(model, x, cache):
        y = cached(model, x, cache).a
        return y @ x if fails else y

    cache = Cache(CONFIG)
    with pytest.raises(
        RuntimeError if fails else TraceError, match="shapes" if fails else r"forward changes args\[1\]"
    ):
        fxpipe.trace(Model(made=forward), (x(), cache))
    assert cache.layers == []
    assert cache.by_name == {}


def test_objects_that_hold_tensors_are_refused_as_inputs():
    for given in (Options(inner=[{"h": x()}]), {x()}):
        with pytest.raises(ArgumentError, match=r"input options.*holds tensors.*dataclasses, or register"):
            fxpipe.trace(Model(made=lambda m, x, options: m.one(x)), (x(),), {"options": given})


def test_a_function_may_hold_tensors():
    log = [x()]
    closing_pipe, model = pair_of(lambda m, x, scale: m.two(m.one(x)) * scale())
    with closing_pipe as pipe:
        torch.testing.assert_close(pipe(x(), lambda: len(log)), model(x(), lambda: len(log)))
    with pytest.raises(ArgumentError, match="the batch size cannot vary"):  # a constant of as many samples
        fxpipe.trace(model, (x(), lambda: log[0]))


@pytest.mark.parametrize("kind", [Plain, Frozen, Slots])
def test_targets_of_any_structure(kind):
    def loss(output, target):
        assert type(target) is kind
        return F.mse_loss(output.a, target.a) + F.l1_loss(output.b, target.a)

    closing_pipe, model = pair_of(lambda m, x: Slots(m.two(m.one(x)), m.one(x)))
    with closing_pipe as pipe:
        have = pipe.forward_backward(x(4), target=kind(x(4) + 1), loss_fn=loss)
        want = loss(model(x(4)), kind(x(4) + 1))
        want.backward()
        torch.testing.assert_close(have, want.detach())
        for ours, plain in zip(pipe.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad)
        with pytest.raises(ArgumentError, match="target is an Options that holds tensors"):
            pipe.forward_backward(x(4), target=Options(a=x(4)), loss_fn=loss)
