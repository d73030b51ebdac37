import json
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from functools import cache

import pytest
from helpers.drawn_steps import GIB, KNOWN, bounds, check_scene, simulated

from fxpipe.inspect.gantt import GANTT_MARGIN, MAX_BOXES, PANEL_COLOUR, TIMELINE_FORMATS, draw_gantt, gantt_layout
from fxpipe.inspect.perfetto import perfetto_text
from fxpipe.inspect.style import KIND_COLOURS, RECEIVING_COLOUR
from fxpipe.inspect.svg import Area, Bars, Line, Rect, Scene, Text, svg_of
from fxpipe.runtime.step_record import ActionRecord, StepRecord
from fxpipe.scheduling import Action, ActionKind
from fxpipe.simulation import Simulation

SVG = "{http://www.w3.org/2000/svg}"
STEPS = {
    "one device": lambda: simulated("1f1b", 1, 1),
    "two devices": lambda: simulated("1f1b", 2, 4),
    "copies": lambda: simulated("1f1b", 4, 8, overlaps=False),
    "split backward": lambda: simulated("zero_bubble", 4, 8, unit=1e-6),
    "loops": lambda: simulated("interleaved_1f1b", 4, 8, per_device=2),
    "a V": lambda: simulated("zbv", 8, 16, per_device=2),
    "recompute": lambda: simulated("gpipe", 8, 16, checkpoint="except_last"),
    "minutes": lambda: simulated("1f1b", 64, 4, unit=30),
    "many micro-batches": lambda: simulated("1f1b", 2, 256),
    "no time": lambda: simulated("1f1b", 2, 2, unit=0),
    "no bytes": lambda: simulated("gpipe", 3, 4, has_bytes=False),
    "many devices": lambda: simulated("inference", 300, 1, has_bytes=False),
}
LARGE = {"large": lambda: simulated("1f1b", 64, 64)}  # more actions than boxes


@cache
def _drawn(name: str) -> tuple[Simulation, Scene]:
    found = (STEPS | LARGE)[name]()
    return found, draw_gantt(found.as_step())


def _boxes(drawn: Scene) -> list[Rect | Bars]:
    """The boxes of actions, which are below the legend."""
    fills = {*KIND_COLOURS.values(), RECEIVING_COLOUR}
    top = GANTT_MARGIN + 60
    return [i for i in drawn.items if isinstance(i, Rect | Bars) and i.fill in fills and i.y > top]


def _memory(drawn: Scene) -> list[Rect | Area | Line]:
    """The panels of devices, their parts and limits."""
    others = [i for i in drawn.items if isinstance(i, Area) or (isinstance(i, Line) and i.dashes)]
    return [i for i in drawn.items if isinstance(i, Rect) and i.fill == PANEL_COLOUR] + others


def _end(event: dict) -> float:
    return event["ts"] + max(event["dur"], 1e-3)


@pytest.mark.parametrize("name", [*STEPS, *LARGE])
def test_nothing_is_cut_off_and_no_text_covers_another(name):
    found, drawn = _drawn(name)
    layout = gantt_layout(found.as_step())
    check_scene(drawn)
    for item in (*_boxes(drawn), *_memory(drawn)):
        left, top, right, bottom = bounds(item)
        assert layout.frame.left - 1e-6 <= left
        assert right <= layout.frame.right + 1e-6
        assert layout.top - 2 <= top
        assert bottom <= drawn.height - GANTT_MARGIN + 1e-6


@pytest.mark.parametrize("name", STEPS)
def test_every_action_is_one_box_as_long_as_it_takes(name):
    found, drawn = _drawn(name)
    boxes = [item for item in _boxes(drawn) if item.fill != RECEIVING_COLOUR]
    assert len(boxes) == len(found.spans)
    layout = gantt_layout(found.as_step())
    frame = layout.frame
    scale = frame.width / found.step_seconds if found.step_seconds else 0
    left = defaultdict(list)
    for box in boxes:
        left[box.fill, round((box.y - layout.top) / layout.pitch)].append(box)
    for span in found.spans:
        box = left[KIND_COLOURS[span.action.kind], span.device].pop(0)
        assert box.x == pytest.approx(frame.left + (span.start + span.receiving) * scale, abs=1e-6)
        assert box.width == pytest.approx((span.seconds - span.receiving) * scale if span.seconds else 1, abs=1e-6)
        assert f"stage {span.action.stage}, micro-batch {span.action.micro_batch}:" in box.title
    assert not any(left.values())


def test_what_a_device_copies_is_a_box_before_its_action():
    found, drawn = _drawn("copies")
    copied = [item for item in _boxes(drawn) if item.fill == RECEIVING_COLOUR]
    assert len(copied) == sum(span.receiving > 0 for span in found.spans) > 0
    frame = gantt_layout(found.as_step()).frame
    scale = frame.width / found.step_seconds
    places = sorted((frame.left + s.start * scale, s.receiving * scale) for s in found.spans if s.receiving)
    for item, place in zip(sorted(copied, key=lambda item: (item.x, item.width)), places, strict=True):
        assert (item.x, item.width) == pytest.approx(place)
    assert "receiving" in {item.text for item in drawn.items if isinstance(item, Text)}


def test_an_update_takes_no_time_and_is_seen():
    record = KNOWN
    update = ActionRecord(Action(ActionKind.UPDATE, 0, 0), 0.010, 0.010, 0, 0.0, 0, 0)
    step = StepRecord("x", (*record.actions, update), (), record.devices, 0.0).as_step()
    drawn = draw_gantt(step)
    stroke = next(item for item in _boxes(drawn) if item.fill == KIND_COLOURS[ActionKind.UPDATE])
    assert stroke.width == 1
    assert stroke.x + stroke.width == pytest.approx(gantt_layout(step).frame.right)


def test_beside_each_row_stand_the_device_its_busy_time_and_its_bubble():
    drawn = draw_gantt(KNOWN.as_step())
    texts = [item.text for item in drawn.items if isinstance(item, Text)]
    for text in ("device 0: cpu", "device 1: cuda:0", "3.50 ms", "65.0 %", "5.00 ms", "50.0 %"):
        assert text in texts
    assert "measured step 10.0 ms, mean bubble 57.5 %" in texts
    assert not _memory(drawn), "of a measured step memory is not known"


def test_more_actions_than_boxes_are_a_shape_for_each_kind_and_device():
    found, drawn = _drawn("large")
    boxes = _boxes(drawn)
    assert len(found.spans) > MAX_BOXES
    assert len(boxes) == 2 * 64
    covered = sum(right - left for item in boxes for left, right in item.spans)
    assert covered / gantt_layout(found.as_step()).frame.width == pytest.approx(sum(found.busy) / found.step_seconds)
    assert sum(len(item.spans) for item in boxes) == len(found.spans)
    assert len(svg_of(drawn)) < 400_000


def test_the_parts_of_a_devices_memory_are_stacked_to_its_peak():
    found, drawn = _drawn("two devices")
    panels = [item for item in _memory(drawn) if isinstance(item, Rect)]
    areas = [item for item in _memory(drawn) if isinstance(item, Area)]
    scale = max(memory.peak for memory in found.memory) * 1.04 / panels[0].height  # bytes for each point
    for d, (panel, memory) in enumerate(zip(panels, found.memory, strict=True)):
        of_device = [area for area in areas if area.title.startswith(f"device {d}:")]
        assert [re.search(r": (\w+),", area.title)[1] for area in of_device] == [
            "parameters",
            "gradients",
            "activations",
            "working",
        ]
        highest = min(y for area in of_device for _, y in area.points)
        assert (panel.y + panel.height - highest) * scale == pytest.approx(memory.peak)
    peaks = [item.text for item in drawn.items if isinstance(item, Text) and item.text.endswith("GiB")]
    assert peaks == [f"{memory.peak / GIB:.1f} GiB" for memory in found.memory]


def test_of_many_devices_those_closest_to_their_limits_have_a_panel():
    found, drawn = _drawn("minutes")
    labels = [item.title.partition(":")[0] for item in _memory(drawn) if isinstance(item, Area)]
    peaks = [memory.peak for memory in found.memory]
    fullest = sorted(range(64), key=lambda d: -peaks[d])[:8]
    assert [*dict.fromkeys(labels)] == [f"device {d}" for d in sorted(fullest)]
    assert any("of the 8 devices closest to their limits" in i.text for i in drawn.items if isinstance(i, Text))


@pytest.mark.parametrize(("limit", "is_drawn"), [(4 * GIB, True), (2.1 * GIB, True), (80 * GIB, False)])
@pytest.mark.parametrize("devices", [2, 9])
def test_a_limit_is_a_line_unless_it_would_flatten_the_curves(limit, is_drawn, devices):
    found = simulated("1f1b", devices, 4)
    limited = Simulation(*(getattr(found, name) for name in ("schedule", "stages", "transfers", "spans")),
                         found.seconds, found.legs, limits=(limit,) * devices)  # fmt: skip
    drawn = draw_gantt(limited.as_step())
    check_scene(drawn)
    lines = [item for item in _memory(drawn) if isinstance(item, Line) and item.dashes]
    assert bool(lines) is is_drawn
    texts = " ".join(item.text for item in drawn.items if isinstance(item, Text))
    assert ("lies above" in texts) is not is_drawn
    assert f"limit {'' if is_drawn else 'of '}{limit / GIB:.1f} GiB" in texts


def test_every_format_is_written_whole(tmp_path):
    found = STEPS["two devices"]()
    for form in TIMELINE_FORMATS:
        path = tmp_path / f"step.{form.upper()}"
        found.save_timeline(path, title="A <title> & more")
        assert path.stat().st_size > 1000
    assert ElementTree.parse(tmp_path / "step.SVG").getroot().get("aria-label").startswith("A <title> & more")
    assert json.loads((tmp_path / "step.JSON").read_text())["otherData"]["schedule"] == "1f1b"
    assert sorted(path.suffix[1:].lower() for path in tmp_path.iterdir()) == sorted(TIMELINE_FORMATS), (
        "nothing else is left"
    )
    KNOWN.save_timeline(tmp_path / "record.svg")
    assert "measured step" in (tmp_path / "record.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["two devices", "a V", "recompute"])
def test_the_trace_of_a_simulation_has_its_actions_arrows_and_memory(name):
    found = STEPS[name]()
    events = json.loads(perfetto_text(found))["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == len(found.spans)
    by_name = {span.action: span for span in found.spans}
    for event in actions:
        span = by_name[Action.parse(event["name"])]
        assert event["ts"] == pytest.approx(span.start * 1e6, abs=1e-2)
        assert event["dur"] == pytest.approx(span.seconds * 1e6, abs=1e-2)
    starts, ends = ([event for event in events if event["ph"] == ph] for ph in "sf")
    assert len(starts) == len(ends) == len(found.transfers) * found.schedule.micro_batches
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        assert start["ts"] <= end["ts"]
        (maker,) = (one for one in actions if one["tid"] == start["tid"] and one["ts"] <= start["ts"] < _end(one))
        assert maker["args"]["bytes sent"] >= start["args"]["bytes"]
    for d, memory in enumerate(found.memory):
        counted = [event for event in events if event["ph"] == "C" and event["name"] == f"memory of device {d}"]
        assert max(sum(event["args"].values()) for event in counted) == memory.peak
        assert len({tuple(event["args"]) for event in counted}) == 1, "a viewer stacks the same parts all along"
