"""What torch keeps private is named in `fxpipe._torch` alone; it may be missing if optional, or the error says so."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import fxpipe
from fxpipe._torch import autograd, checkpoint, modes
from fxpipe._torch.fake_tensor_mode import FakeTensorMode
from fxpipe.errors import TorchVersionError

ROOT = Path(fxpipe.__file__).parent
WALL = ROOT / "_torch"
FILES = sorted(ROOT.rglob("*.py"))
# Private names of others: of Python, of numpy, of named tuples; and what a `Pipeline` has for `fxpipe` itself.
NOT_TORCH = {
    *"_fxpipe _fxpipe_model _fxpipe_call _fxpipe_class_of_model".split(),
    *"_is_gil_enabled _getframe _replace _fields _inst _rand".split(),
}
PRIVATE_TORCH = re.compile(r"\btorch(\.[a-zA-Z]\w*)*\._[a-z]\w*", re.IGNORECASE)


def _defined_names(tree: ast.AST) -> set[str]:
    """Names that a file gives by itself: functions, classes, fields, what it sets on `self`, what is in `__slots__`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def private_uses(text: str) -> list[str]:
    """Where a file names what torch keeps private: in imports, dotted names and texts, and attributes of any object."""
    tree, found = ast.parse(text), []
    own = _defined_names(tree) | NOT_TORCH
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                found += [f"{module}.{a.name}" for a in names if "._" in f"{module}.{a.name}"]
            case ast.Import(names=names):
                found += [a.name for a in names if PRIVATE_TORCH.fullmatch(a.name)]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if re.match("_[^_]", name) and name not in own:
                found.append(ast.unparse(node))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                found += [ast.unparse(node)] if re.match("_[^_]", name) and name not in own else []
    return found + [match[0] for match in PRIVATE_TORCH.finditer(text)]


@pytest.mark.parametrize(
    "text",
    [
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._device import DeviceContext",
        "import torch._dynamo",
        "x = torch._C._functions.DelayedError",
        "from torch import overrides\noverrides._push_mode(mode)",
        "def f(x): return x._version",
        "x = getattr(node, '_saved_reduction', None)",
        "name = 'torch._subclasses.fake_tensor'",
    ],
)
def test_a_private_name_is_found(text):
    assert private_uses(text)


def test_private_torch_is_named_in_one_folder_alone():
    found = {str(path.relative_to(ROOT)): private_uses(path.read_text()) for path in FILES if WALL not in path.parents}
    assert len(found) > 180
    assert {file: uses for file, uses in found.items() if uses} == {}


def test_each_file_behind_the_wall_says_in_which_versions_it_holds():
    users = [
        p
        for p in WALL.glob("*.py")
        if re.search(r"required_names\(\):|require_attributes\(|optional_name\(", p.read_text())
    ]
    assert len(users) > 12
    for path in users:
        opening = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert path.name == "versions.py" or "2.11" in opening or path.name == "thread_state.py", path.name


# -- Required: where one is missing, the error says which versions of torch are tested -------------------------------


def _required() -> list[tuple[str, str]]:
    """(file, name) of each name that a file behind the wall requires when it is imported."""
    found = []
    for path in sorted(WALL.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "required_names()":
                found += [(path.stem, name) for name in _names_in(node)]
            elif isinstance(node, ast.Expr) and ast.unparse(node).startswith("require_attributes("):
                arguments = ", ".join(map(ast.unparse, node.value.args[1:]))
                names = eval(f"[{arguments}]", vars(importlib.import_module(f"fxpipe._torch.{path.stem}")))
                found += [(path.stem, name) for name in names]
    return found


def _names_in(block: ast.With) -> Iterator[str]:
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        else:
            inner = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            yield from (n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute) and id(n) not in inner)


REQUIRED = _required()


def test_the_required_names_are_found():
    assert len(REQUIRED) > 60
    assert {"_push_mode", "peek_interpreter_stack", "_unsafe_view", "_backward_hooks", "_cdata"} <= {
        n for _, n in REQUIRED
    }


@pytest.mark.parametrize("file", sorted({file for file, _ in REQUIRED}))
def test_without_a_required_name_the_error_tells_the_versions(file):
    path = WALL / f"{file}.py"
    for name in [name for of_file, name in REQUIRED if of_file == file]:
        text = re.sub(rf"\b{name}\b", f"{name}_gone", path.read_text())
        with pytest.raises(TorchVersionError) as caught:
            exec(compile(text, str(path), "exec"), {"__name__": f"fxpipe._torch.{file}"})
        _tells_the_versions(caught.value)
        assert f"{name}_gone" in str(caught.value)


def _tells_the_versions(error: BaseException) -> None:
    first = str(error).splitlines()[0]
    assert torch.__version__ in first
    assert "2.11 to 2.14" in first


def test_without_a_required_name_fxpipe_says_so_to_the_user():
    program = "import torch; del torch.overrides._push_mode; import fxpipe; fxpipe.pipeline(torch.nn.Linear(1, 1))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = [line for line in done.stderr.splitlines() if "TorchVersionError" in line][-1]
    assert done.returncode
    assert torch.__version__ in last
    assert "2.11 to 2.14" in last


def test_keys_of_torchs_own_modes_are_required_where_modes_are_told_apart(monkeypatch):
    mode = FakeTensorMode()
    modes._require_mode_keys.cache_clear()
    monkeypatch.setattr("fxpipe._torch.fake_tensor_mode.FakeTensorMode", object)
    with pytest.raises(TorchVersionError) as caught:
        modes.is_infrastructure_mode(mode)
    _tells_the_versions(caught.value)
    monkeypatch.undo()
    assert modes.is_infrastructure_mode(mode)


def test_what_nodes_of_a_loss_know_is_required_where_it_is_asked(monkeypatch):
    with pytest.raises(TorchVersionError) as caught:
        autograd.output_shape(object(), 0)
    _tells_the_versions(caught.value)
    autograd._require_saved_reduction.cache_clear()
    monkeypatch.setattr(torch._C._functions, "NllLossBackward0", object)
    with pytest.raises(TorchVersionError) as caught:
        autograd.saved_reduction(object())
    _tells_the_versions(caught.value)


# -- Optional: where one is missing, models train to the same ---------------------------------------------------------


def _optional() -> list[str]:
    """`file:name`, or `file:name,name` of those that are missing together, as `torch_without.py` takes them."""
    found = []
    for path in sorted(WALL.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="optional_name"), args=[_, ast.Constant(value=name)]):
                    found.append(f"{path.stem}:{name}")
    return [*found, f"checkpoint:{','.join(checkpoint._NAMES)}"]


OPTIONAL = _optional()


@pytest.fixture(scope="module")
def trained_without(tmp_path_factory):
    """What came of training without each name, in processes that are forked from one."""
    folder = str(tmp_path_factory.mktemp("trained"))
    program = [sys.executable, "-m", "helpers.torch_without", folder, *OPTIONAL]
    return subprocess.run(program, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=500).stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONAL)
def test_without_an_optional_name_two_steps_come_to_the_same(name, trained_without):
    assert f"{name} ok" in trained_without.splitlines(), trained_without
    warns = [line for line in trained_without.splitlines() if line.startswith(f"{name} warns")]
    assert bool(warns) == name.startswith("checkpoint:")
    assert all("2.11 to 2.14" in line for line in warns)


# -- Nothing of torch stays replaced -----------------------------------------------------------------------------------


def test_imports_replace_nothing_of_torch():
    program = """
import importlib, pkgutil, sys, torch, torch.utils.checkpoint, torch.fx.experimental.symbolic_shapes, torch.export
def owners():
    return [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "torch"] + [
        torch.Tensor, torch.nn.Module, torch.autograd.Function, torch.autograd.function.FunctionMeta, torch.fx.Graph]
def of_fxpipe():
    return {f"{o.__name__}.{k}" for o in owners() for k, v in list(vars(o).items())
            if str(getattr(v, "__module__", "")).startswith("fxpipe")}
import fxpipe
names = [m.name for m in pkgutil.walk_packages(fxpipe.__path__, "fxpipe.") if not m.name.endswith("__main__")]
names = [name for name in names if not name.startswith("fxpipe.integrations.")]  # which need the other libraries
for name in names:
    importlib.import_module(name)
print(len(names), of_fxpipe())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, _, replaced = done.stdout.strip().partition(" ")
    assert int(count) > 180
    assert replaced == "set()"


def test_checkpoints_are_torchs_own_again_after_each_step():
    before = dict(vars(torch.utils.checkpoint))
    seen = []

    class Noisy(torch.nn.Module):
        def forward(self, x):
            seen.append(vars(torch.utils.checkpoint)[checkpoint._NAME] is before[checkpoint._NAME])
            return torch.nn.functional.dropout(x, 0.5)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Noisy(), torch.nn.Linear(2, 2))
    with fxpipe.pipeline(model, devices=["cpu", "cpu"], chunks=2, leaf_modules=["1"], progress=False) as pipe:
        for _ in range(2):
            pipe(torch.ones(4, 2)).sum().backward()
            assert dict(vars(torch.utils.checkpoint)) == before
    assert seen[-1] is False  # in a stage they are taken over
    assert dict(vars(torch.utils.checkpoint)) == before


def test_blocks_of_several_threads_put_checkpoints_back_when_the_last_one_leaves():
    own = vars(torch.utils.checkpoint)[checkpoint._NAME]
    first, second = checkpoint.call_checkpoints_through(), checkpoint.call_checkpoints_through()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(torch.utils.checkpoint)[checkpoint._NAME] is not own
    second.__exit__(None, None, None)
    assert vars(torch.utils.checkpoint)[checkpoint._NAME] is own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_a_forked_child_has_torchs_own_checkpoints():
    own = vars(torch.utils.checkpoint)[checkpoint._NAME]
    with checkpoint.call_checkpoints_through():
        child = os.fork()
        if not child:
            is_own = vars(torch.utils.checkpoint)[checkpoint._NAME] is own
            os._exit(0 if is_own else 1)
    assert os.waitpid(child, 0)[1] == 0
