"""Hardware known by its figures, links between devices, and what nodes would take on it."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.models import GPT, UNet
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import Hardware, cluster_of, fit_link, load_hardware, local_link, local_memory, parse_hardware
from fxpipe.partitioning.chain import Link
from fxpipe.profiling.probe import OperationCounter
from fxpipe.utils import accelerator

NETWORK = Link(1e9, 1e-5)
PLAIN = Hardware("plain", {"float32": 1e12, "bfloat16": 16e12}, 1e11, 2**30, None, NETWORK)  # no launch, no losses


def test_an_unknown_name_says_what_is_known():
    with pytest.raises(ArgumentError, match=r"'b100' is unknown; there are 'a100-80gb', 'h100', .*Hardware\("):
        parse_hardware("b100")
    with pytest.raises(ArgumentTypeError, match=r"hardware=80 is an int; expected 'a100-80gb'"):
        parse_hardware(80)


def test_hardware_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    figures = {"flops_per_second": {"float32": 1e12}, "bytes_per_second": 1e11, "memory": 2**30, "launch": 1e-6}
    path.write_text(json.dumps(figures | {"within": {"bytes_per_second": 24e9, "latency": 5e-6}}))
    expected = Hardware("mine", **figures, within=Link(24e9, 5e-6), between=None)
    assert load_hardware(path) == expected
    path.write_text(json.dumps(figures | {"memory": -1}))
    with pytest.raises(ArgumentError, match=r"mine\.json.*memory=-1"):
        load_hardware(path)
    for text in ("", "[]", "{}", json.dumps(figures | {"memmory": 1}), json.dumps(figures | {"within": 24e9})):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=r"mine\.json: is not a file of Hardware"):
            load_hardware(path)
    with pytest.raises(ArgumentError, match="No such file"):
        load_hardware(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bytes_per_second": 0.0}, "bytes_per_second=0.0; expected a finite number above 0"),
        ({"memory": -1}, "memory=-1"),
        ({"memory": "80GB"}, "memory='80GB'"),
        ({"launch": float("nan")}, "launch=nan; expected a finite number 0 or more"),
        ({"flops_per_second": {"float32": float("inf")}}, r"flops_per_second\['float32'\]=inf"),
        ({"flops_per_second": {"bfloat16": 1e12}}, "rates for bfloat16; give one for 'float32'"),
        ({"within": Link(0.0)}, "within.bytes_per_second=0.0"),
        ({"between": Link(1.0, -1.0)}, "between.latency=-1.0"),
        ({"devices_per_node": 0}, "devices_per_node=0"),
        ({"devices_per_node": 1.5}, "expected a whole number"),
        ({"nodes": 0}, "nodes=0"),
        ({"memory_efficiency": 1.1}, "at most 1"),
    ],
)
def test_figures_that_cannot_be_are_refused(change, words):
    with pytest.raises(ArgumentError, match=words):
        replace(PLAIN, **change)


def test_the_longest_of_arithmetic_traffic_and_launch_counts():
    some = replace(PLAIN, arithmetic_efficiency=0.5, memory_efficiency=0.25, launch=1e-3)
    assert some.seconds(1e12, "float32", 0) == 2.0
    assert some.seconds(16e12, "bfloat16", 0) == 2.0
    assert some.seconds(1e12, "float8_e5m2", 0) == 2.0  # a type without a rate
    assert some.seconds(1e12, "float32", 1e11) == 4.0
    assert some.seconds(1.0, "float32", 1.0) == 1e-3


def test_links_go_by_position():
    two = replace(PLAIN, within=Link(5e9), devices_per_node=2)
    found = [[cluster_of(two, 4).link(a, b) for b in range(4)] for a in range(4)]
    near, far = two.within, two.between
    assert found == [[None, near, far, far], [near, None, far, far], [far, far, None, near], [far, far, near, None]]
    assert cluster_of(PLAIN, 9).link(0, 7) is None  # handed over
    assert cluster_of(PLAIN, 9).link(0, 8) == NETWORK


@given(st.floats(1e6, 1e12), st.floats(0, 1e-2))
def test_two_copies_tell_a_link(rate, latency):
    link = fit_link(latency + 2**12 / rate, latency + 2**26 / rate)
    assert link.bytes_per_second == pytest.approx(rate, rel=1e-6)
    assert link.latency == pytest.approx(latency, rel=1e-6, abs=1e-9)


def test_copies_too_noisy_to_tell_a_latency_still_tell_a_rate():
    assert fit_link(2e-3, 1e-3) == Link(2**26 / 1e-3, 0.0)
    assert fit_link(1e-9, 1.0).latency == 0.0


def test_between_processors_values_are_handed_over():
    cpu = torch.device("cpu")
    assert local_link(cpu, cpu) is None
    assert local_link(cpu, torch.device("cpu", 0)) is None
    assert local_link(torch.device("cuda", 1), torch.device("cuda", 1)) is None
    assert local_memory(cpu) is None


def test_a_way_is_measured_once_by_copies_of_two_sizes(monkeypatch):
    copies, pinned = [], []
    monkeypatch.setattr(accelerator, "synchronize", lambda *devices: None)
    monkeypatch.setattr(accelerator, "copy_to", lambda memory, device: copies.append((memory.numel(), device)))
    monkeypatch.setattr(accelerator, "pinned", lambda memory: pinned.append(memory.numel()) or memory)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **kwargs: zeros(*args, **kwargs))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 63)
    first = local_link(cpu, cuda)
    assert {n for n, _ in copies} == {2**12, 2**26}
    assert {d for _, d in copies} == {cuda}
    assert pinned == [n for n, _ in copies]  # as between stages
    number = len(copies)
    assert local_link(cpu, cuda) is first
    assert len(copies) == number
    local_link(cuda, cpu)
    assert len(copies) == 2 * number
    assert len(pinned) == number  # the copy itself goes into pinned memory


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_at_hand():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    total = torch.cuda.get_device_properties(cuda).total_memory
    assert 0 < local_memory(cuda) <= total
    assert local_link(cuda, torch.device("cuda", torch.cuda.current_device())) is None
    for a, b in ((cpu, cuda), (cuda, cpu)):
        link = local_link(a, b)
        assert 1e8 < link.bytes_per_second < 1e12
        assert 0 <= link.latency < 1e-2


def _costs(model, x, hardware=PLAIN, micro_batch=None, chunks=1):
    traced = fxpipe.trace(model, (x,), chunks=chunks)
    return {c.name: c for c in fxpipe.profile(traced, (x,), hardware=hardware, micro_batch=micro_batch).nodes}


def _product(rows, width_in, width_out):
    return 2 * rows * width_in * width_out


def test_autocast_is_heeded():
    class Cast(Layered, linear=lambda: nn.Linear(4096, 4096, bias=False)):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

    with torch.device("meta"):
        model, x = Cast(), torch.zeros(4096, 4096)
    (cost,) = _costs(model, x).values()
    casts = 2 * 6 * 4096 * 4096 / 1e11  # of weight and input: 4 bytes read, 2 written
    assert cost.forward.at(4096) == pytest.approx(_product(4096, 4096, 4096) / 16e12 + casts)


def test_tf32_counts_where_torch_takes_it():
    tensor_cores = replace(PLAIN, flops_per_second={"float32": 1e12, "tfloat32": 8e12})
    with torch.device("meta"):
        linear, x = nn.Linear(4096, 4096, bias=False), torch.zeros(4096, 4096)
        conv, y = nn.Conv2d(256, 256, 3, padding=1, bias=False), torch.zeros(4, 256, 64, 64)
    flops = 2 * 4 * 64 * 64 * 256 * 256 * 9
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        assert _only(_costs(linear, x, tensor_cores)).forward.at(4096) == pytest.approx(2 * 4096**3 / 1e12)
        assert _only(_costs(conv, y, tensor_cores)).forward.at(4) == pytest.approx(flops / 8e12)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert _only(_costs(linear, x, tensor_cores)).forward.at(4096) == pytest.approx(2 * 4096**3 / 8e12)
        assert _only(_costs(conv, y, tensor_cores)).forward.at(4) == pytest.approx(flops / 1e12)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.conv.fp32_precision = before[1]


def _only(costs):
    (cost,) = costs.values()
    return cost


def test_seconds_are_lines_over_the_batch():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU()), torch.zeros(8, 1000)
    linear, relu = _costs(model, x).values()
    # So few samples: it takes as long as it takes to read the weights, and a little for each sample.
    assert linear.forward.fixed == pytest.approx(4 * 1000 * 1000 / 1e11)
    assert linear.forward.per_sample == pytest.approx(4 * 2 * 1000 / 1e11)
    assert relu.forward.fixed == pytest.approx(0.0, abs=1e-15)
    assert relu.forward.per_sample == pytest.approx(4 * 2 * 1000 / 1e11)


def test_a_launch_is_a_fixed_cost_and_a_view_none():
    slow = replace(PLAIN, launch=1.0)
    with torch.device("meta"):
        model, x = nn.Sequential(nn.ReLU(), nn.Flatten()), torch.zeros(8, 2, 2)
    relu, flatten = _costs(model, x, slow).values()
    assert relu.forward.at(1) == relu.forward.at(1000) == 1.0
    assert flatten.forward.at(1000) == 0.0


def test_the_part_of_backward_for_weights():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 2048, bias=False))
    x = torch.zeros(2048, 2048, device="meta")
    first, relu, last = _costs(model, x).values()
    product = _product(2048, 2048, 2048) / 1e12
    assert first.backward.at(2048) == first.weight.at(2048) == pytest.approx(product)  # nobody wants the input's
    assert relu.weight.at(2048) == 0.0 < relu.backward.at(2048)
    assert last.backward.at(2048) == pytest.approx(2 * product)
    assert last.weight.at(2048) == pytest.approx(product)


def test_what_is_made_of_weights_alone_belongs_to_their_part():
    class Normed(Layered, weight=lambda: nn.Parameter(torch.zeros(1024, 1024))):
        def forward(self, x):
            return x @ (self.weight * 2).t()

    with torch.device("meta"):
        model, x = Normed(), torch.zeros(1024, 1024).requires_grad_()
    times, transposed, product = _costs(model, x).values()
    assert times.backward.at(1024) == times.weight.at(1024) > 0
    assert transposed.backward.at(1024) == 0
    assert product.weight.at(1024) == pytest.approx(product.backward.at(1024) / 2)


class InPlace(nn.Module):
    """Writes to what others see, frozen and trained, through views, and changes shapes in place."""

    def __init__(self, changes_shapes=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.changes_shapes = changes_shapes

    def forward(self, x):
        kept = torch.zeros_like(x)
        for _ in range(2):
            kept[:, 1:].add_(self.first(x)[:, 1:])
            row = kept[:, 0]
            row.add_(1.0)
            kept = self.second(F.relu_(self.norm(kept)))
        if self.changes_shapes:
            kept.unsqueeze_(1).squeeze_(1)
        return kept * row[:, None]


MODELS = {
    "gpt": (lambda: GPT(layers=2), lambda: torch.randint(0, 17, (4, 8))),
    "unet": (UNet, lambda: torch.randn(4, 3, 16, 16)),
    "in place": (InPlace, lambda: torch.randn(4, 8)),
    "shapes in place": (lambda: InPlace(True), lambda: torch.randn(4, 8)),
    "lstm": (lambda: nn.LSTM(4, 5, batch_first=True), lambda: torch.randn(4, 3, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), lambda: torch.randn(4, 3, 8)),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])  # its kernel has memory of its own
def test_the_nodes_together_take_what_the_model_takes(name):
    make, make_input = MODELS[name]
    model, x = make(), make_input()
    costs = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware=PLAIN)
    with OperationCounter() as record:
        model(x)
    seconds = sum(PLAIN.seconds(flops, dtype, moved) for dtype, flops, moved in record.take())
    assert costs.forward_seconds == pytest.approx(seconds)


def test_backward_of_the_nodes_takes_what_backward_of_the_model_takes():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(4, 8)
    costs = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware=PLAIN)
    y = model(x)
    with OperationCounter() as record:
        torch.autograd.grad([y], list(model.parameters()), [torch.ones_like(y)])
    seconds = sum(
        PLAIN.seconds(arithmetic, dtype, moved) for dtype, arithmetic, moved in record.take()[1:]
    )  # without the ones
    assert costs.backward_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", [*MODELS][1::2])
def test_a_model_with_values_is_estimated_like_the_one_without_and_not_run(name, monkeypatch):
    make, make_input = MODELS[name]
    model, x = make(), make_input()
    with torch.device("meta"):
        meta = make()
    want = fxpipe.profile(fxpipe.trace(meta, (x,)), (x,), hardware="h100")
    traced = fxpipe.trace(model, (x,))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    ran = []
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *args, real=F.linear: ran.append(type(args[0])) or real(*args)
    )
    have = fxpipe.profile(traced, (x,), hardware="h100")
    assert have.estimated_for == want.estimated_for == "NVIDIA H100 SXM"
    assert have.nodes == want.nodes
    assert torch.Tensor not in ran
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_model_that_asks_for_values_is_estimated_on_them():
    class Picks(Layered, linear=8, norm=lambda: nn.BatchNorm1d(8)):
        def forward(self, x):
            y = F.dropout(self.norm(self.linear(x)))
            z = torch.zeros_like(y)
            z[y > 0] = y[y > 0] * 2
            return z

    torch.manual_seed(0)
    model, x = Picks(), torch.randn(4, 8)
    costs = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware=PLAIN)
    with OperationCounter() as record:
        model(x)
    seconds = sum(PLAIN.seconds(flops, dtype, moved) for dtype, flops, moved in record.take())
    assert costs.forward_seconds == pytest.approx(seconds, rel=0.2)  # other numbers are dropped and picked
    assert costs.estimated_for == "plain"
