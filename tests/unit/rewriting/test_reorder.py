"""Another order of the nodes: fewer bytes across the cuts, and the plain model bit for bit."""

import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers.branching_models import Parts, Tied, Towers, Translation, tokens, vectors
from helpers.layered import Layered
from helpers.partition_problems import partition
from helpers.random_graphs import ANY_MODEL_AND_STEP, random_model
from helpers.reordered import Reordered, shuffled
from torch import fx, nn

from fxpipe.rewriting import forbidden_cuts, reorder_nodes, sent_bytes, split_into_stages
from fxpipe.rewriting.linear_order import Items, ItemValue, arrange_items, order_cost
from fxpipe.rewriting.reorder import OrderConstraints
from fxpipe.tracing import Traced, trace
from fxpipe.tracing.node_info import NodeInfo, bytes_at, bytes_formula, info
from fxpipe.tracing.verify.effects import effects_of, observe_run

# -- plain numbers ---------------------------------------------------------------------------------------------------


def items(row: str, sizes: dict[str, int] | None = None, works: dict[str, int] | None = None) -> Items:
    """From `a b:a c:a,b`: each item, and what it uses. The last one makes the output."""
    sizes, works = sizes or {}, works or {}
    names = [word.partition(":")[0] for word in row.split()]
    uses = {word.partition(":")[0]: [u for u in word.partition(":")[2].split(",") if u] for word in row.split()}
    users = {name: tuple(k for k, other in enumerate(names) if name in uses[other]) for name in names}
    return Items(
        tuple(works.get(name, 4) for name in names),
        tuple(ItemValue(sizes.get(n, 8), k, users[n], n == names[-1]) for k, n in enumerate(names)),
        tuple(users[name] for name in names),
    )


def names_in_order(row: str, **given: dict[str, int]) -> str:
    names = [word.partition(":")[0] for word in row.split()]
    return " ".join(names[item] for item in arrange_items(items(row, **given)))


def test_what_is_used_late_is_computed_late():
    row = "embed drop:embed e1 e2:e1 e3:e2 e4:e3 d1:drop,e4 d2:d1"
    assert names_in_order(row) == "e1 e2 e3 e4 embed drop d1 d2"


def test_branches_in_turns_run_one_after_another():
    assert names_in_order("a1 b1 a2:a1 b2:b1 a3:a2 b3:b2 join:a3,b3") == "a1 a2 a3 b1 b2 b3 join"


def test_what_several_use_goes_to_the_first_of_them():
    row = "mask x1 x2:x1 x3:x2 x4:x3,mask x5:x4 x6:x5,mask x7:x6"
    assert names_in_order(row) == "x1 x2 x3 mask x4 x5 x6 x7"


def parallel_branches(count: int) -> Items:
    """One root, branches of three items, and one item that joins them."""
    branches = [f"{k}a:root {k}b:{k}a {k}c:{k}b" for k in range(count)]
    return items(" ".join(["root", *branches, "join:" + ",".join(f"{k}c" for k in range(count))]))


def test_calls_grow_with_the_number_of_branches_and_not_with_its_square():
    def calls(count: int) -> int:
        given, seen = parallel_branches(count), 0

        def record(_frame: object, event: str, _argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(record)
        try:
            arrange_items(given)
        finally:
            sys.setprofile(before)
        return seen

    assert calls(32) < 2.2 * calls(16)


@st.composite
def random_items(draw: st.DrawFn, largest: int = 12) -> Items:
    n = draw(st.integers(1, largest))
    rng = random.Random(draw(st.integers(0, 2**32)))
    after: list[set[int]] = [set() for _ in range(n)]
    for item in range(n):
        for source in rng.sample(range(item), min(item, rng.choice([0, 1, 1, 2]))):
            after[source].add(item)
    values = [
        ItemValue(rng.choice([0, 1, 1, 2, 8, 16]), item, tuple(sorted(users)), not users or rng.random() < 0.1)
        for item, users in enumerate(after)
        if users or rng.random() < 0.7
    ]
    for _ in range(rng.choice([0, 0, 1, 2]) if n > 1 else 0):
        one, other = sorted(rng.sample(range(n), 2))
        after[one].add(other)
    return Items(tuple(rng.choice([1, 2, 5]) for _ in range(n)), tuple(values), tuple(tuple(sorted(a)) for a in after))


def renumbered(given: Items, order: tuple[int, ...]) -> Items:
    new = {item: at for at, item in enumerate(order)}
    return Items(
        tuple(given.weights[item] for item in order),
        tuple(
            ItemValue(v.bytes, new[v.maker], tuple(sorted(new[u] for u in v.users)), v.is_output) for v in given.values
        ),
        tuple(tuple(sorted(new[other] for other in given.after[item])) for item in order),
    )


def valid_orders(given: Items) -> Iterator[tuple[int, ...]]:
    def more(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(given.weights):
            yield done
        for item in range(len(given.weights)):
            if item not in done and all(k in done for k, later in enumerate(given.after) if item in later):
                yield from more((*done, item))

    return more(())


@hypothesis.given(random_items())
@hypothesis.settings(max_examples=150)
def test_any_items_get_a_valid_order_that_costs_no_more_and_stays(given):
    order = arrange_items(given)
    place = {item: at for at, item in enumerate(order)}
    assert sorted(order) == [*range(len(given.weights))]
    assert all(place[item] < place[other] for item, later in enumerate(given.after) for other in later)
    assert order_cost(given, order) <= order_cost(given, range(len(order)))
    assert arrange_items(renumbered(given, order)) == tuple(range(len(order)))


def test_most_of_what_could_be_saved_is():
    @hypothesis.given(random_items(largest=7))
    @hypothesis.settings(max_examples=60, database=None)
    def compare(given: Items) -> None:
        now = order_cost(given, range(len(given.weights)))
        could.append(now - min(order_cost(given, order) for order in valid_orders(given)))
        did.append(now - order_cost(given, arrange_items(given)))

    could: list[int] = []
    did: list[int] = []
    compare()
    assert sum(could) > 1000
    assert sum(did) > 0.8 * sum(could)


def test_the_cost_of_an_order_is_what_lives_at_each_cut():
    given = items("a b:a c:a d:b,c", sizes={"a": 1, "b": 10, "c": 100, "d": 1000}, works={"a": 1, "b": 3, "c": 5})
    # Between a and b: 1 * (1 + 3); b and c: (1 + 10) * (3 + 5); c and d: (10 + 100) * (5 + 4); d and the end: 1000 * 4.
    assert order_cost(given, range(4)) == 4 + 88 + 990 + 4000


# -- models ----------------------------------------------------------------------------------------------------------


class InPlace(Towers):
    def step(self, layer, norm, x):
        x += F.relu(layer(x * 1), inplace=True)
        x[:, 0] = 0
        x.mul_(0.5)
        return x


class Dropout(Towers):
    def step(self, layer, norm, x):
        return F.dropout(x, 0.3, self.training) + F.dropout(layer(x), 0.5, self.training)


class BatchNorm(Towers):
    def step(self, layer, norm, x):
        return x + norm(layer(x))


class Autocast(Towers):
    def step(self, layer, norm, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=layer is not self.left[1]):
            y = layer(x)
        return x + torch.tanh(y.float())


class NoGrad(Towers):
    def step(self, layer, norm, x):
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True) + 1
        return x / scale + layer(x)


class ValueReader(Layered, weight=lambda: nn.Parameter(torch.tensor(0.5))):
    def forward(self, x):
        return x * self.weight if (x * self.weight).sum().item() > -1e6 else x - self.weight


class Whole(Towers):
    def __init__(self):
        super().__init__()
        self.readers = nn.ModuleList(ValueReader() for _ in range(2))

    def step(self, layer, norm, x):
        return self.readers[layer is self.left[0]](torch.tanh(layer(x)))


class ManyUsers(Towers):
    """Values whose gradient is a sum of many: the order of the summands shows in the last bits."""

    def step(self, layer, norm, x):
        h = layer(x)
        return (
            torch.sin(h)
            + torch.cos(h * 3) / 3
            + h.sum(1, keepdim=True) * 0.1
            + torch.tanh(h).mean(1, keepdim=True)
            + x * 0.7
        )


class SetsABuffer(Towers):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x, y):
        y = torch.tanh(self.right[0](y))
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        x = self.left[0](x - self.average)
        return self.head(torch.cat([x, y], 1))


TOWERS = (Towers, InPlace, Dropout, BatchNorm, Autocast, Tied, NoGrad, Whole, Parts, ManyUsers, SetsABuffer)


@pytest.mark.parametrize(("number", "model"), [*enumerate([Translation, *TOWERS])])
def test_the_plain_model_bit_for_bit(number, model):
    chunks = 1 if model is BatchNorm else 3
    # Autograd makes the views of what is changed in place anew, and adds their gradients as late as they are used.
    loose = tuple(name for name, _ in InPlace().named_parameters()) if model is InPlace else ()
    inputs = tokens() if model is Translation else vectors()
    orders = (reorder_nodes, lambda t: shuffled(t, number))
    for order in orders:
        cuts = Reordered(model().train(), *inputs, order=order, chunks=chunks, loose=loose)
        for k, starts in enumerate(cuts.some_cuts(3, number)):
            cuts.check(
                starts, chunks, ("1f1b", "drop-in", "gpipe")[k % 3], ("never", "always")[(k + number) % 2], seed=k
            )


@hypothesis.given(**ANY_MODEL_AND_STEP, seed=st.integers(0, 2**20), how=st.sampled_from(["ordered", "shuffled"]))
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_model_in_any_order_in_any_stages_is_the_plain_model(program, seed, chunks, schedule, checkpoint, how):
    model, args = random_model(program)
    in_place = any(operation.name in ("relu_", "add_", "mul_", "slice_") for operation in program)
    loose = tuple(name for name, _ in model.named_parameters()) if in_place else ()
    order = reorder_nodes if how == "ordered" else lambda traced: shuffled(traced, seed)
    cuts = Reordered(model, *args, order=order, loose=loose)
    (starts,) = cuts.some_cuts(5, seed)[seed % 5 :][:1]
    cuts.check(starts, chunks, schedule, checkpoint, seed=seed)


# -- what stays, what is better --------------------------------------------------------------------------------------


def without_ordinal(node: fx.Node) -> NodeInfo:
    known = info(node)
    return known if known.rng is None else replace(known, rng=replace(known.rng, ordinal=None))


@functools.cache
def two_models() -> list[tuple[Traced, Traced]]:
    pairs = [(Translation(), tokens()), *((model(), vectors()) for model in TOWERS)]
    traces = [trace(model.train(), inputs, chunks=2) for model, inputs in pairs]
    return [(traced, reorder_nodes(traced)) for traced in traces]


def test_all_nodes_are_there_with_all_that_is_known_of_them_and_it_is_a_fixed_point():
    moved = 0
    for traced, other in two_models():
        names = [n.name for n in traced.graph.nodes]
        assert sorted(names) == sorted(n.name for n in other.graph.nodes)
        moved += names != [n.name for n in other.graph.nodes]
        before = {n.name: n for n in traced.graph.nodes}
        for node in other.graph.nodes:
            old = before[node.name]
            assert (node.op, str(node.target), str(node.args), str(node.kwargs)) == (
                old.op, str(old.target), str(old.args), str(old.kwargs),
            )  # fmt: skip
            assert {**node.meta, "fxpipe": without_ordinal(node)} == {**old.meta, "fxpipe": without_ordinal(old)}
        assert reorder_nodes(other) is other
    assert moved > 8


def test_the_order_keeps_the_constraints():
    for traced, other in two_models():
        place = {n.name: at for at, n in enumerate(other.nodes)}
        units = OrderConstraints.of_graph(traced)
        for unit, later in enumerate(units.after):
            for second in later:
                assert place[units.nodes[unit][-1].name] < place[units.nodes[second][0].name]
        for members in units.nodes:
            assert [place[n.name] for n in members] == [*range(place[members[0].name], place[members[-1].name] + 1)]


def test_effects_are_those_of_the_new_order():
    for traced, other in two_models():
        torch.manual_seed(1)
        sample = [torch.randint(0, 11, x.shape) if not x.dtype.is_floating_point else torch.randn(x.shape)
                  for x in traced.leaves if x.is_tensor]  # fmt: skip
        with torch.enable_grad():
            seen = effects_of(other, [observe_run(other, sample).effects])
        have = other.effects
        assert have is not None
        assert [n.name for n in seen.nodes] == [n.name for n in have.nodes]
        assert list(seen.place.items()) == list(have.place.items())
        assert seen.last == have.last
        assert seen.requires_grad == have.requires_grad
        nodes = [*other.graph.nodes][:-1]
        for one in nodes:  # alias classes have other numbers
            for two in nodes:
                if seen.alias[one] == seen.alias[two] is not None:
                    assert have.alias[one] == have.alias[two]
        numbers = {seen.alias[n]: have.alias[n] for n in nodes}
        for ours, theirs in zip(have.written_classes, seen.written_classes, strict=True):
            assert {numbers[alias] for alias in theirs} <= ours


def test_random_nodes_keep_their_numbers_wherever_they_go():
    traced = trace(Translation().train(), tokens(), chunks=2)
    other = reorder_nodes(traced)
    recorded = [n.name for n in traced.nodes if info(n).is_random]
    assert [n.name for n in other.nodes if info(n).is_random] != recorded
    assert {n.name: info(n).rng.ordinal for n in other.nodes if info(n).is_random} == {
        name: ordinal for ordinal, name in enumerate(recorded)
    }


def test_users_of_a_weight_keep_their_order():
    traced = trace(Tied().train(), vectors(), chunks=2)
    weight = next(n for n in traced.graph.nodes if n.target == "left.0.weight")
    users = [n.name for n in traced.nodes if n in weight.users]
    for other in (reorder_nodes(traced), *(shuffled(traced, seed) for seed in range(5))):
        assert [n.name for n in other.nodes if n.name in users] == users


def test_without_gradients_users_are_free():
    with torch.no_grad():
        traced = trace(Tied().eval(), vectors(), chunks=2)
    weight = next(n for n in traced.graph.nodes if n.target == "left.0.weight")
    users = [n.name for n in traced.nodes if n in weight.users]
    assert [n.name for n in reorder_nodes(traced).nodes if n.name in users] != users


def test_python_that_runs_as_it_is_keeps_its_order():
    traced = trace(Whole().train(), vectors(), chunks=2)
    assert traced.whole
    kept = [n.name for n in traced.nodes if info(n).opaque_module is not None]
    for seed in range(5):
        assert [n.name for n in shuffled(traced, seed).nodes if n.name in kept] == kept


def test_two_traces_have_one_order_whatever_the_size_of_the_example():
    model = Translation().train()
    found = [
        reorder_nodes(trace(model, (torch.randint(0, 11, (b, 7)), torch.randint(0, 11, (b, 4))), chunks=2))
        for b in (4, 4, 9)
    ]
    assert len({traced.fingerprint() for traced in found}) == 1
    assert found[0].fingerprint() != trace(model, tokens(), chunks=2).fingerprint()


def test_a_graph_in_a_good_order_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    traced = trace(model, (torch.randn(4, 4),), chunks=2)
    assert reorder_nodes(traced) is traced


def _sent(traced: Traced, stages: int) -> float:
    cut = partition([1.0] * len(traced.nodes), stages, forbidden=forbidden_cuts(traced))
    sizes = {n.name: bytes_at(bytes_formula(info(n).shapes), traced.batch, 4) for n in traced.graph.nodes}
    return sent_bytes(split_into_stages(traced, cut.starts, [torch.device("cpu")] * stages), sizes)


@pytest.mark.parametrize(("model", "inputs"), [(Translation, tokens), (Towers, vectors), (Parts, vectors)])
def test_fewer_bytes_cross_the_cuts(model, inputs):
    traced = trace(model().train(), inputs(), chunks=2)
    better = reorder_nodes(traced)
    before, after = ([_sent(t, stages) for stages in (2, 3, 4, 5)] for t in (traced, better))
    assert sum(after) < 0.9 * sum(before)
