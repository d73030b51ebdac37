"""What the nodes of a graph cost: bytes exactly, seconds as far as they can be told; the model stays as it was."""

import copy
import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.models import GPT, Block
from helpers.saved_bytes import Of
from torch import fx, nn

import fxpipe
from fxpipe import profiling
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import HARDWARE
from fxpipe.profiling import NodeCost, Profile, node_timing, profile
from fxpipe.profiling.backward_timing import Clock
from fxpipe.profiling.memory import GraphCounts
from fxpipe.profiling.node_timing import TimingRounds
from fxpipe.profiling.profile_data import NO_TIME, ZERO_FORMULA
from fxpipe.tracing import Traced, trace


def profiled(model: nn.Module, *args: Any, **options: Any) -> Profile:
    return profile(trace(model, args), args, budget=0.5, **options)


def by_name(costs: Profile) -> dict[str, NodeCost]:
    return {n.name: n for n in costs.nodes}


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_linear_and_conv_are_exact() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    costs = profiled(model, torch.randn(2, 3, 6, 6))
    conv, flatten, linear = costs.nodes
    b = costs.batch
    assert (conv.parameter_bytes, conv.output_bytes) == (4 * (8 * 3 * 9 + 8), 4 * 8 * 36 * b)
    assert (flatten.parameter_bytes, flatten.output_bytes) == (0, 0)
    assert (linear.parameter_bytes, linear.output_bytes) == (4 * (288 * 10 + 10), 40 * b)
    assert costs.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert costs.output_bytes == 1192 * b


def test_buffers_count_and_half_precision_counts_half() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)).bfloat16()
    costs = profiled(model, torch.randn(4, 4).bfloat16())
    assert costs.parameter_bytes == 2 * (4 * 4 + 16) + 8  # num_batches_tracked is an int64
    assert costs.nodes[-1].output_bytes == 8 * costs.batch


def test_tied_weight_counts_once_at_its_first_user() -> None:
    model = GPT(50, 16)
    costs = profiled(model, torch.randint(50, (2, 8)))
    nodes = by_name(costs)
    assert nodes["tokens"].parameter_bytes == 4 * 50 * 16
    assert nodes["head"].parameter_bytes == 0
    assert costs.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_views_parts_and_in_place_writes_make_nothing() -> None:
    def views(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        left, right = y.chunk(2, 1)
        y.mul_(2)
        F.relu_(y)
        y[:, 0] = 0
        values, _places = y.max(1)
        return values + F.dropout(left + right.transpose(0, 1).t(), 0.5, training=False).sum(1)

    costs = profiled(Of(views), torch.randn(3, 4))
    b = costs.batch
    made = {n.name: n.output_bytes for n in costs.nodes if n.output_bytes != 0}
    assert made == {"add": 16 * b, "max_1": 12 * b, "add_1": 8 * b, "sum_1": 4 * b, "add_2": 4 * b}


def test_contiguous_is_free_only_where_it_does_not_copy() -> None:
    def copies(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().transpose(1, 2).contiguous()

    costs = profiled(Of(copies), torch.randn(2, 4, 3))
    assert [n.output_bytes for n in costs.nodes] == [0, 0, 48 * costs.batch]


def test_equal_blocks_have_equal_seconds() -> None:
    model = nn.Sequential(*(Block(16, 2, 0.1) for _ in range(4)))
    costs = profiled(model, torch.randn(2, 8, 16).requires_grad_())
    each = len(costs.nodes) // 4
    blocks = [costs.seconds[i : i + each] for i in range(0, len(costs.nodes), each)]
    assert blocks == [blocks[0]] * 4


def test_nothing_goes_back_where_nothing_requires_grad() -> None:
    def half_frozen(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (module.weight * 3).exp()
        return torch.sigmoid(x) * scale * module.weight

    costs = by_name(profiled(Of(half_frozen), torch.randn(64, 4)))
    went_back = {name for name, n in costs.items() if n.backward.at(1) > 0}
    assert went_back <= {"mul_2"}
    assert costs["exp"].forward.at(1) > 0


def test_an_equal_layer_without_gradients_is_of_another_kind() -> None:
    class Taught(Layered, first=4, teacher=4, last=4):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            with torch.no_grad():
                wanted = self.teacher(h)
            return self.last(h) - wanted

    costs = by_name(profiled(Taught(), torch.randn(8, 4), hardware="cpu"))
    assert costs["teacher"].backward_flops == 0
    assert costs["last"].backward_flops == 2 * costs["last"].flops > 0


@pytest.fixture
def only_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted or noted beside it, which takes runs of its own."""

    def nothing(traced: Traced, *_: Any) -> GraphCounts:
        costs = {n: NodeCost(n.name, NO_TIME, NO_TIME, ZERO_FORMULA, ZERO_FORMULA) for n in traced.nodes}
        return GraphCounts(costs, ())

    monkeypatch.setattr(profiling, "count_flops_and_bytes", nothing)


def look_at_calls(node: fx.Node, look: Callable[..., object]) -> None:
    """Calls `look` with the first argument of each call of a node's function."""
    function: Any = node.target

    def called(first: Any, *args: Any, **kwargs: Any) -> Any:
        look(first)
        return function(first, *args, **kwargs)

    node.target = called


def run_all_rounds(rounds: TimingRounds) -> None:
    while rounds.round():
        pass


# -- seconds over the micro-batch size -------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_measured")
def test_sizes_that_take_another_graph_are_not_run() -> None:
    def branches(module: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, module.weight) if 2 < x.shape[0] < 7 else x

    seen, x = set(), torch.randn(6, 4)
    traced = trace(Of(branches), (x,))
    look_at_calls(traced.nodes[-1], lambda first: seen.add(len(first)))
    costs = profile(traced, (x,))
    assert seen == {6, 3}
    seen.clear()
    costs = profile(traced, (x,), micro_batch=5)
    assert seen == {5}  # neither 2 nor 7 nor 10 nor 1
    assert costs.nodes[-1].forward.fixed == 0
    assert costs.nodes[-1].forward.per_sample > 0


@pytest.mark.usefixtures("only_measured")
def test_a_size_that_a_node_refuses_is_left_out() -> None:
    x = torch.randn(4, 4)
    traced = trace(nn.Linear(4, 4), (x,))
    tried: list[int] = []

    def refuse(first: torch.Tensor) -> None:
        tried.append(len(first))
        if len(first) == 2:
            raise ValueError("too few")

    look_at_calls(traced.nodes[0], refuse)
    costs = profile(traced, (x,))
    assert list(dict.fromkeys(tried)) == [4, 2, 6]
    assert costs.micro_batch == 4


def test_what_depends_on_parameters_alone_is_fixed() -> None:
    def scaled(module: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 6:  # no other size takes this graph
            x = x * module.weight.exp()
        return x

    costs = by_name(profiled(Of(scaled), torch.randn(6, 4)))
    assert costs["exp"].forward.fixed > 0 == costs["exp"].forward.per_sample
    assert costs["mul"].forward.per_sample > 0 == costs["mul"].forward.fixed


def test_one_profile_serves_other_micro_batch_sizes() -> None:
    """With seconds that depend on the sizes alone, as those of a roofline: where it is flat the line is exact."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512))
    x = torch.zeros(65536, 512, device="meta")
    traced = trace(model, (x,))
    costs = profile(traced, (x,), micro_batch=32768)
    for size in (16384, 65536):
        other = profile(traced, (x,), micro_batch=size)
        for here, there in zip(costs.nodes, other.nodes, strict=True):
            assert here.forward.at(size) == pytest.approx(there.forward.at(size), rel=1e-6)
            assert here.backward.at(size) == pytest.approx(there.backward.at(size), rel=1e-6)
            assert here.weight.at(size) == pytest.approx(there.weight.at(size), rel=1e-6)


def test_operations_are_found_beside_measuring() -> None:
    x = torch.randn(4, 8)
    found = profile(trace(nn.Linear(8, 8), (x,)), (x,), budget=0.01)
    (work,) = (cost.work for cost in found.nodes)
    assert work is not None
    assert [operation.flops(3) for operation in work.forward] == [2 * 3 * 8 * 8]
    assert [operation.flops(3) for operation in work.backward] == [2 * 3 * 8 * 8, 0]


def test_weight_part_follows_from_operations() -> None:
    x = torch.randn(64, 256)
    costs = profiled(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), x)
    first, relu, last = costs.nodes
    assert first.weight.at(64) == first.backward.at(64) > 0
    assert relu.weight.at(64) == 0
    assert 0 <= last.weight.at(64) <= last.backward.at(64)
    assert all(n.weight.fixed <= n.backward.fixed and n.weight.per_sample <= n.backward.per_sample for n in costs.nodes)


def test_what_is_made_of_parameters_is_a_parameter() -> None:
    def transposed(module: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2) @ torch.diag(module.weight.exp())

    x = torch.randn(64, 4).requires_grad_()
    costs = by_name(profiled(Of(transposed), x))
    assert costs["exp"].weight == costs["exp"].backward
    assert costs["mul"].weight.at(64) == 0


# -- devices ---------------------------------------------------------------------------------------------------------


def test_tensors_come_to_the_device_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the meta device as one that is not the model's."""
    meta = torch.device("meta")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    traced, x = trace(model, (torch.randn(2, 4),)), torch.randn(2, 4)
    assert traced.effects is not None
    alive: list[int] = []

    class Watched(TimingRounds):
        def _visit(self, node: Any, place: int) -> None:
            super()._visit(node, place)
            alive.append(sum(isinstance(n.op, str) and n.op == "get_attr" for n in self.values))
            assert all(t.device == meta for t in self.values.values())

    found = Watched(traced, traced.effects, [x], Clock(lambda: 0.0), 1, 0.0, lambda: None, device=meta)
    run_all_rounds(found)
    assert set(alive) == {2}  # weight and bias
    assert not found.values
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_device_may_be_named() -> None:
    x = torch.randn(2, 4)
    traced = trace(nn.Linear(4, 4), (x,))
    assert profile(traced, (x,), device="cpu").device == "cpu"
    with pytest.raises(ArgumentError, match="device: 'gpu' is no device of torch's; 'cpu' and 'cuda:0' are"):
        profile(traced, (x,), device="gpu")
    with pytest.raises(ArgumentError, match="device: 'cuda:99' is not available"):
        profile(traced, (x,), device="cuda:99")


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_seconds_of_a_gpu(where: str) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.BatchNorm1d(1024)).to(where)
    x = torch.randn(64, 1024, device=where)
    traced = trace(model, (x,))
    profile(traced, (x,), device="cuda:0")  # libraries take workspaces, which they keep: 32 MiB on an H100
    state, random = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    costs = profile(traced, (x,), device="cuda:0")
    assert costs.device == "cuda:0"
    assert all(n.forward.at(64) > 0 and n.backward.at(64) > 0 for n in costs.nodes)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert all(torch.equal(value, state[k]) for k, value in model.state_dict().items())
    if where == "cpu":  # a weight is 4 MiB: at most that of one node, its gradients and their sum
        assert torch.cuda.max_memory_allocated() - before < 8 * 4 * 2**20


@pytest.mark.usefixtures("only_measured")
def test_threads_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    traced = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    look_at_calls(traced.nodes[0], lambda _: seen.append(torch.get_num_threads()))
    profile(traced, (torch.randn(2, 4),), threads=2)
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1


# -- what models do --------------------------------------------------------------------------------------------------


def in_place(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.count.add_(1)
    x.mul_(2)
    y = x * module.weight
    left = y[:, :2]
    left.add_(module.weight[:2])
    y += module.count
    F.dropout(y, 0.5, inplace=True)
    return F.relu(y, inplace=True)


def checkpointed(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.utils.checkpoint.checkpoint(lambda v: (v * module.weight).exp(), x, use_reentrant=False)
    return out


def autocast(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ torch.diag(module.weight)) @ torch.diag(module.weight)


def no_derivative(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight + torch.nextafter(x * module.weight, x).detach()


@fxpipe.leaf
def written_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.exp().mul_(2)  # which backward of exp needs


def no_way_back(module: Any, x: torch.Tensor) -> torch.Tensor:
    return written_in_place(x * module.weight)


class Counting(Layered, linear=4, calls=lambda: torch.zeros(())):
    """Kept whole, as it draws in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * (0.5 + random.random())


MODELS = {
    "kept whole": (nn.Sequential(Counting(), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(4, 4)),
    "norm": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), torch.randn(3, 2, 5, 5)),
    "gpt": (GPT(50, 16), torch.randint(50, (2, 8))),
    "lstm": (nn.LSTM(4, 8, batch_first=True), torch.randn(3, 5, 4)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
    "in place": (Of(in_place), torch.randn(3, 4)),
    "checkpoint": (Of(checkpointed), torch.randn(3, 4)),
    "autocast": (Of(autocast), torch.randn(3, 4)),
    "no derivative": (Of(no_derivative), torch.randn(3, 4)),
    "no way back": (Of(no_way_back), torch.randn(3, 4)),
}


@pytest.mark.parametrize(("name", "inputs_require_grad"), each_once(MODELS, [False, True]))
def test_model_inputs_and_random_state_stay_as_they_were(name: str, inputs_require_grad: bool) -> None:
    model, x = copy.deepcopy(MODELS[name][0]), MODELS[name][1].clone()
    # Nobody may write to a leaf that requires grad.
    x.requires_grad_(inputs_require_grad and x.is_floating_point() and name != "in place")
    traced = trace(model, (x,))
    state, given = copy.deepcopy(model.state_dict()), x.detach().clone()
    gradient = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = gradient.clone()
    versions = {k: p._version for k, p in model.named_parameters()}
    generators = torch.get_rng_state(), random.getstate()
    flags = [m.training for m in model.modules()]

    costs = profile(traced, (x,), repeats=2, budget=0.2)

    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [m.training for m in model.modules()] == flags
    assert {k: p._version for k, p in model.named_parameters()} == versions
    assert all(torch.equal(value, state[k]) for k, value in model.state_dict().items())
    grads = [p.grad for p in model.parameters()]
    assert torch.equal(grads[0], gradient)
    assert grads[1:] == [None] * (len(grads) - 1)
    assert torch.equal(x, given)
    assert x.grad is None
    assert [n.name for n in costs.nodes] == [n.name for n in traced.nodes]
    assert all(n.forward.at(1) >= 0 and n.backward.at(1) >= 0 for n in costs.nodes)


def test_seconds_of_a_model_that_torch_can_only_evaluate_are_estimated() -> None:
    traced = trace(Of(no_way_back), (torch.randn(3, 4),))
    costs = {node.name: node for node in profile(traced, (torch.randn(3, 4),), hardware="h100").nodes}
    assert costs["written_in_place"].forward.at(3) > 0
    assert costs["written_in_place"].backward.at(3) == 0


def test_in_place_nodes_leave_later_nodes_the_values_of_the_model() -> None:
    """A wrong value on the way would be out of the table's range, which raises."""

    def checked(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.view(-1).mul_(2)
        y[0, 0] = 7
        module.count.add_(1)
        return torch.nn.functional.embedding((y.sum() + module.count.sum() - 25).long().expand(x.shape[0]), table)

    table = nn.Parameter(torch.randn(5, 2))  # holds 5 rows: other sums than 0 to 4 are out of range
    model = Of(checked)
    model.table = table
    x = torch.tensor([[1.0, 2.0, 3.0, 1.0]])  # 7 + 4 + 6 + 2 + 8 = 27
    traced = trace(model, (x,), out_dims=0)
    assert profile(traced, (x,)).nodes


def test_inference_mode_of_the_caller_does_not_matter() -> None:
    traced = trace(nn.Linear(64, 64), (torch.randn(64, 64),))
    with torch.inference_mode():
        costs = profile(traced, (torch.randn(64, 64),))
    assert costs.nodes[0].backward.at(1) > 0


def test_autocast_of_the_caller_stays_on() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        costs = profile(trace(nn.Sequential(linear, linear), (x,)), (x,))
        assert torch.is_autocast_enabled("cpu")
    assert [n.output_bytes for n in costs.nodes] == [8 * costs.batch] * 2


# -- printing and errors ---------------------------------------------------------------------------------------------


def test_more_samples_than_given_are_refused() -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(4, 4),))
    with pytest.raises(ArgumentError, match="micro_batch=5, but the inputs hold 4 samples"):
        profile(traced, (torch.randn(4, 4),), micro_batch=5)
    with pytest.raises(ArgumentError, match="micro_batch=0: expected a whole number, at least 1"):
        profile(traced, (torch.randn(4, 4),), micro_batch=0)
    with pytest.raises(ArgumentError, match="second=0: expected a whole number, at least 1"):
        profile(traced, (torch.randn(4, 4),), second=0)
    for budget in (float("nan"), float("inf"), -1):
        with pytest.raises(ArgumentError, match=f"budget={budget}: expected seconds, 0 or more and finite"):
            profile(traced, (torch.randn(4, 4),), budget=budget)
    with pytest.raises(ArgumentError, match="threads=0: expected a whole number, at least 1"):
        profile(traced, (torch.randn(4, 4),), threads=0)


def test_a_node_that_writes_to_two_of_its_inputs_is_of_another_kind() -> None:
    """`c += c.view(...)` changes both, `a += b` one, and nothing else tells the two apart: the second one failed."""

    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, c = x * m.weight, x * m.weight
        a += x * m.weight
        c += c.view(-1, 4)
        return a + c

    model, x = Of(twice), torch.randn(4, 4)
    costs = profile(trace(model, (x,)), (x,), budget=0.0)
    assert all(cost.forward.at(4) > 0 for cost in costs.nodes)


def test_inputs_of_another_kind_are_refused() -> None:
    x = torch.randn(4, 4)
    traced = trace(nn.Linear(4, 4), (x,))
    with pytest.raises(ArgumentError, match=r"2 inputs for a graph that was traced on 1 \(input\)"):
        profile(traced, (x, x))
    with pytest.raises(ArgumentError, match="input input is an int; the graph was traced on a tensor"):
        profile(traced, (3,))
    with pytest.raises(ArgumentTypeError, match="expected a tuple and a dict"):
        profile(traced, x)  # type: ignore[arg-type]


def test_batch_size_that_takes_another_graph_is_refused() -> None:
    def branches(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x * module.weight if x.shape[0] > 2 else x

    x = torch.randn(4, 4)
    traced = trace(Of(branches), (x,))
    assert profile(traced, (x,), micro_batch=3).micro_batch == 3
    with pytest.raises(ArgumentError, match=r"the graph does not hold for 2 samples: at .*test_profile\.py"):
        profile(traced, (x,), micro_batch=2)


def test_error_of_a_node_names_it() -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(RuntimeError) as raised:
        profile(traced, (torch.randn(2, 5),))
    assert "while looking at what is saved by linear" in raised.value.__notes__[0]


def test_nodes_that_are_not_timed_take_the_value_of_one_of_their_kind() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(4)), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    traced = trace(model, (x,))
    seconds = itertools.count()  # between any two looks at the clock: 1, so that one sample is enough
    clock = Clock(lambda: next(seconds))
    rounds = TimingRounds(traced, traced.effects, [x], clock, 5, math.inf, lambda: None)
    ran: list[fx.Node] = []
    bound = TimingRounds._bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimingRounds, "_bound", lambda self, node, values: ran.append(node) or bound(self, node, values))
        run_all_rounds(rounds)
    assert ran == [traced.nodes[0], traced.nodes[-1]]


def test_a_view_that_is_written_to_takes_no_value_of_its_kind() -> None:
    """It would be a view of another tensor: of the weight, to which measuring then writes."""

    class Follows(Layered, student=4, teacher=4):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.student.weight.detach().t()
            self.teacher.weight.t().mul_(0.5)
            return y + self.student(x) + self.teacher(x)

    model, x = Follows(), torch.randn(4, 4)
    model.teacher.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    profiled(model, x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_long_node_runs_forward_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    traced = trace(model, (x,))
    first, norm, last = traced.nodes
    calls: list[torch.Tensor] = []
    look_at_calls(norm, calls.append)
    seconds = itertools.count()  # between any two looks at the clock: 1
    rounds = TimingRounds(traced, traced.effects, [x], Clock(lambda: next(seconds)), 5, math.inf, lambda: None)
    run_all_rounds(rounds)
    found = [rounds.measured(node) for node in (first, norm, last)]
    assert [m.forward_seconds for m in found] == [1, 1, 1]
    assert [m.backward_seconds for m in found] == [1, 1, 1]
    assert len(calls) == 1


def test_a_very_long_node_is_scaled_to_other_sizes_by_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_timing, "VERY_LONG_SECONDS", 0.0)
    cost = profiled(nn.Sequential(nn.Linear(512, 512), nn.Tanh()), torch.randn(512, 512), second=256).nodes[0]
    assert cost.work is not None
    less, more = (cost.work.seconds(HARDWARE["cpu"], {"b": b}) for b in (256, 512))
    assert cost.forward.at(256) / cost.forward.at(512) == pytest.approx(less[0] / more[0])
    assert cost.backward.at(256) / cost.backward.at(512) == pytest.approx(less[1] / more[1])


@fxpipe.leaf
def asleep(h: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return h * 1


def test_a_leaf_that_sleeps_costs_what_a_step_waits_for_it() -> None:
    costs = by_name(profiled(Of(lambda module, x: asleep(x * module.weight)), torch.randn(4, 4)))
    waits = max(costs.values(), key=lambda cost: cost.forward.at(4))
    assert ("asleep" in waits.name, waits.forward.at(4) >= 0.02) == (True, True)


def test_indices_are_made_of_their_own_values_and_not_of_others_of_the_same_kind() -> None:
    picks = Of(lambda _, x: (x * 3).gather(1, (x.frac() * 3).long()))  # `x * 3` would be out of range
    assert len(profiled(picks, torch.rand(4, 3) + 9).nodes) == 5


def test_modules_kept_whole_with_other_settings_are_of_other_kinds() -> None:
    class Sleeps(Layered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            return x * 2

    traced = trace(
        nn.Sequential(Sleeps(seconds=0.0), Sleeps(seconds=0.02)), (torch.randn(4, 4),), leaf_modules=(Sleeps,)
    )
    costs = by_name(profile(traced, (torch.randn(4, 4),), budget=0.0))
    assert costs["_1_Sleeps"].forward.at(4) > 2 * costs["_0_Sleeps"].forward.at(4)
