"""Values that stages compute for themselves: which may be, which had better be, and that nothing else changes."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.random_graphs import ANY_MODEL_AND_STEP, random_model
from helpers.reordered import Reordered, shuffled
from torch import nn

from fxpipe.errors import InternalError
from fxpipe.rewriting import PIPE_INPUT, choose_rematerialization, reorder_nodes, split_into_stages
from fxpipe.rewriting.rematerialize import rematerializable_nodes
from fxpipe.tracing import Traced, trace

CPU = torch.device("cpu")


class Masked(nn.Module):
    """A mask, positions and a table, which all layers use, and values of other kinds beside them."""

    def __init__(self, width: int = 6, layers: int = 4):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.learned, self.frozen = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width), False)
        self.register_buffer("frequencies", torch.rand(width))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids):
        mask = (ids != 0)[:, :, None]
        bias = torch.where(mask, 0.0, -1.0)
        positions = torch.arange(ids.shape[1])[None, :, None]
        low, high = torch.cos(positions * self.frequencies).chunk(2, -1)
        grown = self.learned * 2
        iced = self.frozen * 2
        noise = torch.rand(ids.shape[1], 1)
        self.count.add_(1)
        counted = self.count * 2
        written = torch.zeros(ids.shape[1], 1)
        written[0] = 1
        x = self.embed(ids)
        for layer in self.layers:
            turned = torch.cat([low, high], -1) * x + bias
            x = x + torch.tanh(layer(turned)) * mask + grown + iced + noise + counted + written
        return x


def masked(**settings: object) -> Traced:
    return trace(Masked(**settings).train(), (torch.randint(0, 11, (5, 7)),), chunks=2)


def place(traced: Traced, name: str) -> int:
    return [n.name for n in traced.nodes].index(name)


def middle(traced: Traced) -> int:
    return place(traced, "layers_2")


def everything(traced: Traced, stages: int) -> list[list[str]]:
    return [[*rematerializable_nodes(traced)]] * stages


# -- which may be ----------------------------------------------------------------------------------------------------


def test_only_what_is_the_same_everywhere_may_be_a_copy():
    traced = masked()
    may_be = rematerializable_nodes(traced)
    made_by = {n.name: n for n in traced.nodes}
    targets = {str(getattr(made_by[name].target, "__name__", made_by[name].target)) for name in may_be}
    assert {"ne", "where", "arange", "cos", "chunk"} <= targets
    assert not targets & {"rand", "zeros", "__setitem__", "add_", "embedding", "linear", "tanh"}
    assert not any(traced.effects.requires_grad[made_by[name]] for name in may_be)
    users_of = {str(n.target): {u.name for u in n.users} for n in traced.graph.nodes if n.op == "get_attr"}
    assert users_of["frequencies"] <= may_be.keys()
    for name in ("learned", "frozen", "count", "embed.weight"):
        assert not users_of[name] & may_be.keys()


class WritesItsInput(Layered, one=4, two=4):
    def forward(self, x, y):
        scale = y * 2
        x = self.one(x)
        y.add_(1)
        return self.two(x) * scale * (y * 3)


def test_what_depends_on_memory_that_is_written_to_may_not():
    traced = trace(WritesItsInput(), (torch.randn(4, 4), torch.randn(4, 4)), chunks=2)
    assert rematerializable_nodes(traced) == {}


class SizedByOthers(nn.Module):
    """As masks are in libraries: as large as the embedded tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.ones(x.shape[0], x.shape[1]) * (ids != 0)
        for layer in self.layers:
            x = layer(x) * mask[:, :, None]
        return x


def test_a_size_of_what_is_no_copy_is_received_and_the_rest_computed():
    cuts = Reordered(SizedByOthers(), torch.randint(0, 11, (5, 7)), order=lambda t: t, copied=1.0)
    ones = next(n for n in cuts.traced.nodes if n.target is torch.ones)
    (size,) = ones.all_input_nodes
    assert ones.name in rematerializable_nodes(cuts.traced)
    assert size.name not in rematerializable_nodes(cuts.traced)
    starts = (0, place(cuts.traced, "layers_1"))
    assert {r.name for r in cuts.program(starts).stages[1].receives} >= {size.name, "in_0"}
    assert "ones" in cuts.program(starts).stages[1].code
    cuts.check(starts, 3, "1f1b")
    found = chosen(cuts.traced, starts, 1.0, [lambda size: size] * 2)
    assert ones.name in found[1]


def test_what_depends_on_an_input_that_requires_grad_may_not():
    class Model(Layered, layer=4):
        def forward(self, x, y):
            return self.layer(x) * y.detach().abs() * x.detach().abs()

    traced = trace(Model(), (torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)), chunks=2)
    sources = {source for sources in rematerializable_nodes(traced).values() for source in sources}
    assert "in_0" in sources
    assert "in_1" not in sources


class Reader(Layered, seen=lambda: torch.ones(4)):
    """Kept whole, with a buffer that it may change in another step."""

    def forward(self, x):
        return x + self.seen if x.sum().item() > -1e6 else x - self.seen


class WithReader(Layered, layer=4, reader=Reader):
    def forward(self, x):
        table = self.reader.seen * 2
        return self.reader(self.layer(x)) * table


def test_a_module_kept_whole_and_what_shares_its_buffers_may_not():
    traced = trace(WithReader(), (torch.randn(4, 4),), chunks=2)
    assert traced.whole
    assert rematerializable_nodes(traced) == {}


def test_other_names_are_refused():
    traced = masked()
    with pytest.raises(InternalError, match="embed"):
        split_into_stages(traced, (0, middle(traced)), [CPU, CPU], [(), ("embed",)])


# -- what they do ----------------------------------------------------------------------------------------------------


def test_a_stage_computes_its_copies_from_inputs_and_buffers():
    traced = masked()
    starts = (0, middle(traced))
    plain = split_into_stages(traced, starts, [CPU, CPU])
    program = split_into_stages(traced, starts, [CPU, CPU], everything(traced, 2))
    again = rematerializable_nodes(traced)
    assert any(r.name in again for r in plain.stages[1].receives)
    assert not any(r.name in again for r in program.stages[1].receives)
    assert [r.name for r in program.stages[1].receives if r.source == PIPE_INPUT] == ["in_0"]
    assert "frequencies" in program.stages[1].attributes
    assert set(program.stages[0].sends) < set(plain.stages[0].sends)
    assert "cos" in program.stages[1].code
    assert "cos" in program.stages[1].locations
    assert program.stages[0].code.count("cos(") == program.stages[1].code.count("cos(") == 1


def test_of_a_chain_the_rest_is_received():
    traced = masked()
    cos = next(n for n in traced.nodes if "cos" in n.name)
    parts = [n.name for n in traced.nodes if cos in n.all_input_nodes or n.args[:1] == (next(iter(cos.users)),)]
    program = split_into_stages(traced, (0, middle(traced)), [CPU, CPU], [(), parts])
    names = [r.name for r in program.stages[1].receives]
    assert cos.name in names
    assert not set(parts) & set(names)


@pytest.mark.parametrize(
    ("copied", "order"), each_once([1.0, 0.5], [lambda t: t, reorder_nodes, lambda t: shuffled(t, 3)])
)
def test_the_plain_model_bit_for_bit(order, copied):
    # The count is another one in each micro-batch, as in the plain model.
    cuts = Reordered(Masked().train(), torch.randint(0, 11, (5, 7)), order=order, copied=copied, chunks=3)
    for k, starts in enumerate(cuts.some_cuts(10)):
        cuts.check(starts, 3, ("1f1b", "drop-in", "gpipe")[k % 3], ("never", "always")[k % 2], seed=k)


class UnderAutocast(Layered, one=4, two=4):
    """A copy is computed under the state of its own place, within a stage that begins under another one."""

    def forward(self, x, table):
        with torch.autocast("cpu", torch.bfloat16):
            angles = F.softmax(table @ table.T, -1)
        with torch.no_grad():
            small = angles.float() * 0.1
        x = self.one(x)
        return self.two(x @ small) + small.sum() + angles.float().mean()


def test_copies_run_under_the_state_of_their_own_place():
    args = (torch.randn(5, 4), torch.randn(4, 4))
    cuts = Reordered(UnderAutocast(), *args, order=lambda t: t, copied=1.0, chunks=2)
    assert len(rematerializable_nodes(cuts.traced)) >= 4
    for k, starts in enumerate(cuts.cuts(2)):
        cuts.check(starts, 2, ("1f1b", "drop-in")[k % 2])


@hypothesis.given(**ANY_MODEL_AND_STEP, seed=st.integers(0, 2**20))
@hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_model_with_any_copies_is_the_plain_model(program, seed, chunks, schedule, checkpoint):
    model, args = random_model(program)
    names = tuple(name for name, _ in model.named_parameters())
    cuts = Reordered(model, *args, order=lambda t: t, copied=0.8, loose=names)
    hypothesis.assume(rematerializable_nodes(cuts.traced))
    (starts,) = cuts.some_cuts(5, seed)[seed % 4 + 1 :][:1]
    cuts.check(starts, chunks, schedule, checkpoint, seed=seed)


# -- which had better be ---------------------------------------------------------------------------------------------


def chosen(traced: Traced, starts: tuple[int, ...], seconds: float, receive: list) -> tuple[tuple[str, ...], ...]:
    program = split_into_stages(traced, starts, [CPU] * len(starts))
    nodes = [n.name for n in traced.graph.nodes]
    sizes = dict.fromkeys(nodes, 100.0) | {"in_0": 10.0, "frequencies": 10.0}
    return choose_rematerialization(traced, program, dict.fromkeys(nodes, seconds), sizes, receive)


def test_a_value_that_is_handed_over_is_not_computed_again():
    traced = masked()
    starts = (0, place(traced, "layers_1"), place(traced, "layers_2"))
    found = chosen(traced, starts, 1e-6, [None, None, lambda size: size])
    assert found[0] == found[1] == ()
    assert "cos" in found[2]


def test_slow_links_make_copies_and_fast_ones_do_not():
    traced = masked()
    starts = (0, middle(traced))
    assert chosen(traced, starts, 1.0, [lambda size: size * 1e-3] * 2) == ((), ())
    equal = sum(name in rematerializable_nodes(traced) for name in chosen(traced, starts, 0.0, [lambda _: 0.0] * 2)[1])
    assert equal == 0  # where it takes the same time, values are received
    slow = chosen(traced, starts, 1.0, [lambda size: size * 1e3] * 2)
    program = split_into_stages(traced, starts, [CPU] * 2, slow)
    assert not any(r.name in rematerializable_nodes(traced) for r in program.stages[1].receives)
    assert list(slow[1]) == [name for name in rematerializable_nodes(traced) if name in slow[1]]


def test_an_input_that_the_stage_does_not_have_has_its_price():
    traced = masked()
    starts = (0, middle(traced))
    sizes = {n.name: 1.0 for n in traced.graph.nodes}
    program = split_into_stages(traced, starts, [CPU] * 2)
    free = dict.fromkeys(sizes, 0.0)

    def of_ids(large: float) -> set[str]:
        found = choose_rematerialization(traced, program, free, sizes | {"in_0": large}, [lambda size: size] * 2)[1]
        return {name for name in found if "in_0" in rematerializable_nodes(traced)[name]}

    assert of_ids(0.5)
    assert not of_ids(100.0)


def test_a_tuple_is_computed_with_its_part():
    traced = masked()
    starts = (0, middle(traced))
    found = chosen(traced, starts, 1e-3, [lambda size: size] * 2)[1]
    assert {"chunk", "chunk_0", "chunk_1"} <= set(found)
