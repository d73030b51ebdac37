"""Devices are asked for by `utils.accelerator` alone, and no make of them is named but for what only that one has."""

import ast
import re
from pathlib import Path

import fxpipe

ROOT = Path(fxpipe.__file__).parent
ROOM = "utils/accelerator.py"
FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}

MAKES = r"(cuda|xpu|hip|mps|mtia|npu)"
OF_A_MAKE = re.compile(rf"torch\.(backends\.|version\.)?{MAKES}\b|.*\.is_{MAKES}|.*\.{MAKES}")
NAMED = re.compile(rf"{MAKES}(:\d*)?")
GENERIC = re.compile(
    r"torch\.(accelerator|get_device_module)\b.*|torch\.(Stream|Event)\(.*|.*\.(record_stream|is_pinned|pin_memory)"
)

# Makes that are named, and why.
ALLOWED = {
    ("hardware.py", "'cuda:'"): "names of devices that are elsewhere, of a table of hardware",
    ("profiling/flops.py", "backends.cuda"): "TF32, which tables of GPUs have a rate for",
    ("tracing/model_state.py", "torch.backends.cuda"): "switches of attention, which hold on every device",
}


def device_uses(text: str) -> set[str]:
    """The expressions of a file that name a make of devices, or torch's interface to all of them."""
    tree, found = ast.parse(text), set()
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(value)) if id(node) not in documents and NAMED.fullmatch(value):
                found.add(repr(value))
            case ast.Attribute() | ast.Call() if OF_A_MAKE.fullmatch(ast.unparse(node)):
                found.add(ast.unparse(node))
            case ast.Attribute() | ast.Call() if GENERIC.fullmatch(ast.unparse(node)):
                found.add(ast.unparse(node))
            case ast.keyword(arg="pin_memory"):
                found.add("pin_memory=")
    return found


def test_devices_are_asked_for_in_one_room_alone():
    found = {(file, use) for file, text in FILES.items() if file != ROOM for use in device_uses(text)}
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "what nobody uses need not be allowed"


def test_the_room_names_no_make():
    own = {use for use in device_uses(FILES[ROOM]) if OF_A_MAKE.fullmatch(use) or NAMED.fullmatch(use.strip("'"))}
    assert own == set()


def test_a_use_is_found():
    for text in (
        "torch.cuda.synchronize(device)",
        "if device.type == 'cuda': pass",
        "f'cuda:{index}'",
        "x.is_cuda",
        "x.cuda()",
        "torch.accelerator.synchronize()",
        "event = torch.Event(device=device)",
        "x.record_stream(stream)",
        "torch.empty(3, pin_memory=True)",
        "torch.get_device_module(kind).device_count()",
    ):
        assert device_uses(text), text
    for text in ('"""Runs on "cuda"."""', "stream: torch.Stream", "raise Error('cuda:0 is not here')"):
        assert not device_uses(text), text
