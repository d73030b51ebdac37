"""`pipe.last_step`: what each action did, what went between them, and the trace that viewers open."""

import json
import time
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.drawn_plans import drawn_plan
from helpers.drawn_steps import KNOWN
from helpers.layered import Layered
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, FileError
from fxpipe.runtime.exchange import boundary_value_bytes
from fxpipe.scheduling import make_schedule
from fxpipe.scheduling.actions import ActionKind

WIDTH, BATCH = 8, 6  # float32: 32 bytes a sample


class Skipping(Layered, a=WIDTH, b=WIDTH, c=WIDTH):
    """Three stages, one for each layer; the first one's value goes on to the second and past it to the third."""

    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        return self.c(x + y)


def _pipe(chunks=3, devices=3, **options):
    torch.manual_seed(0)
    options = {"checkpoint": "never", "balance": ["a", "b"]} | options
    return oracle.closing(fxpipe.pipeline(Skipping(), ["cpu"] * devices, chunks, example_args=(_x(),), **options))


def _x():
    return torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)


def _step(pipe):
    return pipe.forward_backward(_x(), target=torch.ones(BATCH, WIDTH), loss_fn=F.mse_loss)


def _check(record):
    """What holds for every record."""
    for d, device in enumerate(record.devices):
        mine = [a for a in record.actions if a.device == d]
        assert device.busy == pytest.approx(sum(a.end - a.start for a in mine))
        assert device.waited == pytest.approx(sum(a.waited for a in mine))
        assert device.received == sum(a.received for a in mine)
        assert device.sent == sum(a.sent for a in mine)
        assert 0 <= record.bubble(d) <= 1
        assert device.busy + device.waited <= record.seconds * (1 + 1e-9)
        for before, after in pairwise(mine):
            assert before.end <= after.start
    assert sum(a.received for a in record.actions) == sum(a.sent for a in record.actions)
    assert sum(a.received for a in record.actions) == sum(t.bytes for t in record.transfers)


def _ways(record, i):
    """The transfers of a micro-batch as (maker, user, bytes)."""
    return sorted((str(t.maker), str(t.user), t.bytes) for t in record.transfers if t.maker.micro_batch == i)


def test_metrics_are_numbers_by_name_for_loggers():
    with _pipe() as pipe:
        _step(pipe)
        record = pipe.last_step
        metrics = record.metrics()
        assert all(type(value) is float for value in metrics.values())
        assert metrics["seconds"] == record.seconds
        assert metrics["samples_per_second"] == BATCH / record.seconds
        assert metrics["bubble"] == pytest.approx(sum(map(record.bubble, range(3))) / 3)
        assert metrics["loss_seconds"] == sum(record.losses)
        for d, device in enumerate(record.devices):
            names = ("busy_seconds", "waited_seconds", "bubble")
            assert [metrics[f"device_{d}/{name}"] for name in names] == [device.busy, device.waited, record.bubble(d)]
        assert not any("memory" in name for name in metrics), "the CPU does not measure it"
        pipe(_x()).sum().backward()
        assert pipe.last_step.metrics()["samples_per_second"] == BATCH / pipe.last_step.seconds
        pipe.forward_backward(micro_batches=[_x()[:2], _x()[:1]], loss_fn=lambda y: y.mean())
        assert pipe.last_step.metrics()["samples_per_second"] == 3 / pipe.last_step.seconds


@pytest.mark.parametrize(("executor", "checkpoint"), [("workers", "always"), ("one thread", "never")])
def test_a_step_is_recorded_with_what_went_between_stages(executor, checkpoint):
    with _pipe(checkpoint=checkpoint) as pipe:
        usual = pipe._fxpipe.engine.executor
        pipe._fxpipe.engine.executor = InterleavedExecutor(1) if executor == "one thread" else usual
        before = time.perf_counter()
        _step(pipe)
        took = time.perf_counter() - before
        record = pipe.last_step
        usual.close()
    _check(record)
    rows = make_schedule("1f1b", 3, 3, checkpoint).rows
    assert {a.action: a.device for a in record.actions} == {a: d for d, row in enumerate(rows) for a in row}
    assert (record.schedule, record.away) == ("1f1b", 0)
    assert all(a.on_core is not None and a.on_core >= 0 for a in record.actions)
    assert 0 < record.seconds <= took
    size = BATCH // 3 * WIDTH * 4
    for i in range(3):
        assert _ways(record, i) == [
            (f"0F{i}", f"1F{i}", size),  # to the second layer
            (f"0F{i}", f"2F{i}", size),  # past it
            (f"1B{i}", f"0B{i}", size),  # the gradient of the first value, to which both users have added
            (f"1F{i}", f"2F{i}", size),
            (f"2B{i}", f"1B{i}", size),
            (f"2B{i}", f"1B{i}", size),
        ]
    assert all(t.is_gradient == (t.user.kind is ActionKind.BACKWARD) for t in record.transfers)


def test_updates_of_the_weights_are_in_the_record_of_the_step_before_them():
    with _pipe() as pipe:
        optimizers = [
            fxpipe.optim.StageOptimizer(
                pipe, torch.optim.SGD, lr=0.1, param_groups=lambda name, p, kind=kind: {} if kind in name else None
            )
            for kind in ("weight", "bias")
        ]
        _step(pipe)
        backward = pipe.last_step
        time.sleep(0.05)
        optimizers[0].step()
        one = pipe.last_step
        time.sleep(0.05)
        optimizers[1].step()
        record = pipe.last_step
        pipe(_x()).sum().backward()
        optimizers[0].step()
        drop_in = pipe.last_step
    for made in (one, record, drop_in):
        _check(made)
    assert [str(a.action) for a in backward.actions if a.action.kind is ActionKind.UPDATE] == []
    for made, times in ((one, 1), (record, 2), (drop_in, 1)):
        updates = [a for a in made.actions if a.action.kind is ActionKind.UPDATE]
        assert sorted(str(a.action) for a in updates) == sorted(["0U2", "1U2", "2U2"] * times)
        assert {a.action.stage: a.device for a in updates} == {0: 0, 1: 1, 2: 2}
        assert min(a.start for a in updates) >= max(a.end for a in made.actions if a not in updates)
    assert record.seconds < backward.seconds + 0.05, "what the caller does in between is left out"
    comparison = fxpipe.simulate(pipe.plan).compared(record)
    assert comparison.step.measured == pytest.approx(backward.seconds)
    assert ActionKind.UPDATE not in comparison.kinds


def test_a_drop_in_is_recorded_without_what_the_caller_does_in_between():
    with _pipe() as pipe:
        loss = pipe(_x()).sum()
        forward = pipe.last_step
        assert {a.action.kind for a in forward.actions} == {ActionKind.FORWARD}
        time.sleep(0.05)
        loss.backward()
        record = pipe.last_step
    _check(forward)
    _check(record)
    assert forward.away == 0
    assert record.away >= 0.05
    assert tuple(a for a in record.actions if a.action.kind is ActionKind.FORWARD) == forward.actions
    end = max(a.end for a in forward.actions)
    backward = [a for a in record.actions if a.action.kind is ActionKind.BACKWARD]
    assert min(a.start for a in backward) >= end
    first = {a.device: a for a in reversed(backward)}
    for d, a in first.items():  # what a device waited while the others came to the end of forward is not its wait for B
        assert a.waited == pytest.approx(a.start - end, abs=1e-6), f"device {d}"
    # The outputs and their gradients are the caller's: no transfer.
    assert {(t.maker.stage, t.user.stage) for t in record.transfers} == {(0, 1), (0, 2), (1, 2), (2, 1), (1, 0)}


def test_bytes_follow_the_sizes_of_uneven_micro_batches():
    with _pipe(chunks=4) as pipe:  # 2, 2, 1, 1 samples
        _step(pipe)
        sizes = {t.maker.micro_batch: t.bytes for t in pipe.last_step.transfers}
    assert sizes == {0: 2 * WIDTH * 4, 1: 2 * WIDTH * 4, 2: WIDTH * 4, 3: WIDTH * 4}


LAYOUTS = {
    "strided": (lambda: torch.ones(3, 5), 60),
    "a view": (lambda: torch.ones(3, 5)[:, :2], 24),
    "sparse": (lambda: torch.eye(4).to_sparse(), 16),
    "compressed": (lambda: torch.eye(4).to_sparse_csr(), 16),
    "in blocks": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), 32),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 20),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), 0),
    "none": (lambda: [1, 2], 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_bytes_of_any_layout(layout):
    make, size = LAYOUTS[layout]
    assert boundary_value_bytes(make()) == size


def test_a_step_that_fails_leaves_the_record_of_the_one_before():
    with _pipe() as pipe:
        _step(pipe)
        before = pipe.last_step
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe.forward_backward(_x(), loss_fn=lambda y: (y @ y).sum())
        assert pipe.last_step is before


# -- as text, and as a trace -----------------------------------------------------------------------------------------


def test_a_record_prints_as_a_table_and_a_timeline():
    assert str(KNOWN).splitlines() == [
        "1f1b: 4 actions in 10.0 ms",
        "  device             busy    waited    bubble    received     sent",
        "--------  ------  -------  --------  --------  ----------  -------",
        "       0  cpu     3.50 ms   6.50 ms    65.0 %     2.0 KiB  2.0 KiB",
        "       1  cuda:0  5.00 ms   3.00 ms    50.0 %     2.0 KiB  2.0 KiB",
        "",
        "device 0: F0= .............B0",
        "device 1: ......F0= B0=== ....",
    ]


def test_the_trace_of_a_step_is_one_that_viewers_read(tmp_path):
    path = tmp_path / "step.json"
    with _pipe(checkpoint="always") as pipe:
        _step(pipe)
        record = pipe.last_step
        record.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) and e["name"] for e in events)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(record.actions) == 27
    for e, a in zip(spans, record.actions, strict=True):
        assert e["ts"] == pytest.approx(a.start * 1e6, abs=1e-2)
        assert e["dur"] == pytest.approx((a.end - a.start) * 1e6, abs=1e-2)
        assert e["args"]["stage"] == a.action.stage
        assert e["args"]["micro-batch"] == a.action.micro_batch
        assert e["args"]["bytes received"] == a.received
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(record.transfers) == 18
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"]), "by these and the id a viewer pairs them"
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"  # it ends at the event that holds it, not at the next one
        for one in (start, end):  # an arrow's end lies in an event of its row
            assert any(s["tid"] == one["tid"] and s["ts"] <= one["ts"] <= s["ts"] + s["dur"] for s in spans)


def test_a_path_that_cannot_be_written_says_so(tmp_path):
    for save in (KNOWN.save_trace, KNOWN.save_timeline, drawn_plan(2).save):
        with pytest.raises(FileError, match=r"cannot be saved to .*missing/step.json'.* another path") as caught:
            save(tmp_path / "missing" / "step.json")
        assert isinstance(caught.value, ArgumentError)
        assert isinstance(caught.value, OSError)
    for path in (tmp_path, tmp_path / "x.json" / "y.json"):
        (tmp_path / "x.json").touch()
        with pytest.raises(FileError, match="a trace cannot be saved to"):
            KNOWN.save_trace(path)
    assert [found.name for found in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ArgumentTypeError, match="path=3: expected the path of a file"):
        KNOWN.save_trace(3)


@pytest.mark.cuda
def test_times_on_a_gpu_are_its_streams_and_a_step_waits_for_none():
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    x = torch.ones(64, 2048, device="cuda")
    with fxpipe.pipeline(model, ["cuda:0", "cuda:0"], 4, example_args=(x,), checkpoint="never") as pipe:
        for _ in range(3):
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        torch.cuda.synchronize()
        before = time.perf_counter()
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        record = pipe.last_step
        took = time.perf_counter() - before
    assert all(-1e-3 <= a.start <= a.end <= took + 1e-3 for a in record.actions)
    assert sum(device.busy for device in record.devices) > 0
    assert {device.name for device in record.devices} == {"cuda:0"}
