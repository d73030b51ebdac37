"""Steps to draw, and what tests ask a picture."""

from fxpipe.inspect.style import text_width
from fxpipe.inspect.svg import Area, Bars, Line, Rect, Scene, Text
from fxpipe.runtime.step_record import ActionRecord, DeviceRecord, StepRecord
from fxpipe.scheduling import make_schedule
from fxpipe.scheduling.actions import Action, ActionKind
from fxpipe.simulation import Simulation, StageCost, simulate_schedule, transfers_of
from fxpipe.simulation.timeline import TransferRecord

GIB = 2.0**30


# A step that ran.
F0, F1, B1, B0 = (
    Action(k, j, 0)
    for k, j in ((ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 1), (ActionKind.BACKWARD, 0))
)
KNOWN = StepRecord(
    "1f1b",
    (
        ActionRecord(F0, 0.0, 0.002, 0, 0.0, 0, 2048),
        ActionRecord(F1, 0.003, 0.005, 1, 0.003, 2048, 0),
        ActionRecord(B1, 0.005, 0.008, 1, 0.0, 0, 2048),
        ActionRecord(B0, 0.0085, 0.010, 0, 0.0065, 2048, 0),
    ),
    (TransferRecord(F0, F1, 2048, "relu"), TransferRecord(B1, B0, 2048, "relu")),
    (DeviceRecord("cpu", 0.0035, 0.0065, 2048, 2048), DeviceRecord("cuda:0", 0.005, 0.003, 2048, 2048)),
    0.0,
)


def simulated(
    name: str,
    devices: int,
    micro_batches: int,
    *,
    per_device: int = 1,
    checkpoint: str = "never",
    unit: float = 1e-3,
    overlaps: bool = True,
    has_bytes: bool = True,
) -> Simulation:
    """A step whose stages differ a little, as real ones do; F of the first takes `unit` seconds."""
    n = devices * per_device
    schedule = make_schedule(name, stages=n, micro_batches=micro_batches, checkpoint=checkpoint)
    held = {"parameter_bytes": GIB, "gradient_bytes": GIB, "saved_bytes": GIB / 4, "working_bytes": GIB / 8}
    costs = [
        StageCost(unit * (1 + j % 3 / 10), unit * (2 + j % 3 / 5), **(held if has_bytes else {})) for j in range(n)
    ]
    ways = [t for j in range(n - 1) for t in transfers_of(j, [j + 1], 2.0**20, seconds=lambda *_: unit * 0.15)]
    return simulate_schedule(schedule, costs, ways, overlaps=overlaps)


def bounds(item) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    match item:
        case Rect():
            return item.x, item.y, item.x + item.width, item.y + item.height
        case Bars():
            return item.spans[0][0], item.y, item.spans[-1][1], item.y + item.height
        case Line() | Area():
            xs, ys = zip(*item.points, strict=True)
            return min(xs), min(ys), max(xs), max(ys)
        case Text():
            width = text_width(item.text, item.size, is_bold=item.is_bold)
            left = item.x - {"start": 0, "middle": width / 2, "end": width}[item.anchor]
            return left, item.y - item.size * 0.76, left + width, item.y + item.size * 0.24
    raise TypeError(item)


def check_scene(scene: Scene) -> None:
    """All is inside, and no text covers another."""
    for item in scene.items:
        left, top, right, bottom = bounds(item)
        assert left >= 0, item
        assert top >= 0, item
        assert right <= scene.width, item
        assert bottom <= scene.height, item
    texts = sorted((bounds(item), item.text) for item in scene.items if isinstance(item, Text))
    for k, ((_, top, right, bottom), text) in enumerate(texts):
        for (other_left, other_top, _, other_bottom), other in texts[k + 1 :]:
            if other_left >= right:
                break
            assert other_top >= bottom or other_bottom <= top, (text, other)
