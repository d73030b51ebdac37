"""The command `python -m fxpipe.inspect`, and what it makes of a plan."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.inspected import MIB, make_plan, refusal
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, PartitionError
from fxpipe.inspect.cli import main
from fxpipe.inspect.cli_options import parse_pin_option
from fxpipe.inspect.json_document import plan_document
from fxpipe.inspect.plan_text import plan_text
from fxpipe.inspect.run import inputs_advice
from fxpipe.inspect.targets import InputOption, InputShape, Target, make_arguments, parse_input, parse_target
from fxpipe.planning import passes
from fxpipe.planning.plans.data import HeaviestNode, OpaqueNode, Portal, TiedParameter
from fxpipe.utils.polynomial import Polynomial

MODEL_FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 16)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, tokens, scale=1.0):
        print("the model says something")
        x = self.embed(tokens)
        y = self.second(self.first(x).relu()).relu()
        return self.third(x + y) * scale


def make_mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Zoo:
    small = staticmethod(make_mlp)


make_net = Net
ready = make_mlp()
number = 3


def make_wrong():
    return [make_mlp()]


def make_error():
    raise KeyError("width")


def tensor_inputs():
    return torch.zeros(8, 5, dtype=torch.int64)


def tuple_inputs():
    return torch.zeros(8, 5, dtype=torch.int64), 2.0


def dict_inputs():
    return {"tokens": torch.zeros(8, 5, dtype=torch.int64), "scale": 0.5}


def list_inputs():
    return [torch.zeros(8, 5, dtype=torch.int64)]
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with factories, in the current directory, which is not on the path yet."""
    path = tmp_path / "zoo_of_models.py"
    path.write_text(MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield path
    sys.modules.pop(path.stem, None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The model, arguments, keyword arguments and settings of each planning."""
    calls, trace_and_profile = [], passes.trace_and_profile
    monkeypatch.setattr(passes, "trace_and_profile", lambda *args: calls.append(args) or trace_and_profile(*args))
    return calls


def fail_planning(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(passes, "trace_and_profile", Mock(side_effect=error))


def test_table_of_two_stages() -> None:
    text = plan_text(
        make_plan(2, portals=(Portal("encoder_relu", 0, 1, 3 * 1024, Polynomial.in_b(0, 1536), "net.py:7"),))
    )
    assert text == (
        """\
2 stages, 4 micro-batches of at most 2 samples
schedule 1f1b, checkpoint never, balance block, graph 0123456789ab

  stage  device      nodes    parameters    forward    backward        in    memory    sends    portals
                                                                   flight                        in/out
-------  --------  -------  ------------  ---------  ----------  --------  --------  -------  ---------
      0  cpu             2      10.0 MiB    1.00 ms     2.00 ms         2  28.0 MiB  1.0 MiB        -/1
      1  cpu             2      10.0 MiB    2.00 ms     4.00 ms         1  25.0 MiB        -        1/-

portal          from    to    bytes    of b samples  line
------------  ------  ----  -------  --------------  --------
encoder_relu       0     1  3.0 KiB          1536*b  net.py:7

memory in bytes, with micro-batches of b samples
- stage 0: 4194304*b + 20971520
- stage 1: 2097152*b + 22020096

balance 1.33 (slowest device / mean), bubble 33.3 % of device time, step 27.0 ms, parameters 20.0 MiB"""
    )


def test_table_says_how_the_graph_was_made_and_what_it_holds_for() -> None:
    plan = replace(make_plan(2), why=("module 'moe' is kept whole: it reads",), guards=("item of max was 3 at a.py:7",))
    assert "how it was traced\n- module 'moe' is kept whole: it reads\n\nholds where" in plan_text(plan)
    assert "mini-batch)\n- item of max was 3 at a.py:7\n\nbalance" in plan_text(plan)
    document = plan_document(plan)
    assert document["why"] == list(plan.why)
    assert document["guards"] == list(plan.guards)
    many = plan_text(replace(plan, guards=tuple(f"guard {k}" for k in range(30))))
    assert "- guard 9\n- and 20 more" in many
    assert "guard 10" not in many


def test_table_says_what_is_tied_kept_whole_and_heaviest() -> None:
    plan = replace(
        make_plan(3),
        tied=(TiedParameter(("wte.weight", "head.weight"), (0, 2), 2 * MIB), TiedParameter(("a", "b"), (1,), 8)),
        whole=(OpaqueNode("moe", "it reads values", "net.py:9"),),
        why=("module 'moe' is kept whole: it reads values", "recorded with general paths"),
        heaviest=HeaviestNode("layer2_linear", 2, 8.1e-3, "net.py:12"),
    )
    text = plan_text(plan)
    assert "- wte.weight = head.weight, 2.0 MiB, in stages 0 and 2: the other copies it for each step" in text
    assert "- a = b, 8 B, in stage 1" in text
    assert "modules and methods kept whole, each one node\n- moe (net.py:9): it reads values" in text
    assert "how it was traced\n- recorded with general paths" in text  # and the reason of a module but once
    assert "heaviest node layer2_linear, 8.10 ms, 90 % of stage 2 (net.py:12): no cut makes" in text
    document = plan_document(plan)
    assert document["tied"][0] == {"names": ["wte.weight", "head.weight"], "stages": [0, 2], "bytes": 2 * MIB}
    assert document["whole"] == [{"name": "moe", "why": "it reads values", "line": "net.py:9"}]
    assert document["heaviest"] == {"name": "layer2_linear", "stage": 2, "seconds": 8.1e-3, "line": "net.py:12"}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("8", InputOption(InputShape((8,), "float32"))),
        ("input_ids=8x128:int64", InputOption(InputShape((8, 128), "int64"), "input_ids")),
        ("x=data:make", InputOption(Target("data", "make"), "x")),
        ("pkg.data:Batches.make", InputOption(Target("pkg.data", "Batches.make"))),
        ("2d/models.py:make", InputOption(Target("2d/models.py", "make"))),
        (r"C:\models.py:make", InputOption(Target(r"C:\models.py", "make"))),
    ],
)
def test_parse_input(text: str, parsed: InputOption) -> None:
    assert parse_input(text) == parsed


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "bool"])
def test_inputs_are_drawn(dtype: str) -> None:
    state = torch.get_rng_state()
    (first,) = make_arguments([InputOption(InputShape((64, 3), dtype))]).args
    (second,) = make_arguments([InputOption(InputShape((64, 3), dtype))]).args
    assert first.shape == (64, 3)
    assert first.dtype is getattr(torch, dtype)
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())
    if not first.is_floating_point():
        assert sorted(set(first.flatten().tolist())) == [0, 1]  # what every embedding accepts


def test_inputs_that_cannot_be_made() -> None:
    for sizes in [(10**9, 10**9, 10**9), (10**30,)]:
        with pytest.raises(ArgumentError, match="cannot be made"):
            make_arguments([InputOption(InputShape(sizes, "float32"))])


def test_inputs_of_a_function(model_file: Path) -> None:
    where = str(model_file)
    shape = InputOption(InputShape((8, 2), "float32"))
    assert len(make_arguments([shape, InputOption(Target(where, "tensor_inputs"))]).args) == 2
    arguments = make_arguments(
        [shape, InputOption(Target(where, "tuple_inputs")), InputOption(Target(where, "dict_inputs"))]
    )
    assert len(arguments.args) == 3
    assert arguments.args[2] == 2.0
    assert list(arguments.kwargs) == ["tokens", "scale"]
    with pytest.raises(ArgumentError, match=r"returned a list; expected a tensor, a tuple of .* or a dict of"):
        make_arguments([InputOption(Target(where, "list_inputs"))])
    with pytest.raises(ArgumentError, match="argument 'scale' was given by an --input before it"):
        make_arguments([InputOption(Target(where, "dict_inputs")), InputOption(Target(where, "dict_inputs"))])


def test_parse_target() -> None:
    assert parse_target("a/b.py:make") == Target("a/b.py", "make")
    assert parse_target("c:/b.py:make") == Target("c:/b.py", "make")
    for text in ["models", "models:", "a/b:make", "models:make it", ""]:
        with pytest.raises(ArgumentError, match=r"expected module:factory or path/to/file.py:factory"):
            parse_target(text)


def test_parse_pin() -> None:
    assert parse_pin_option("lm_head=0") == ("lm_head", 0)
    assert parse_pin_option("encoder = cuda:1") == ("encoder", "cuda:1")
    with pytest.raises(ArgumentError, match="expected the name of a module or node and a device"):
        parse_pin_option("lm_head=")


def test_options_reach_planning(model_file: Path, asked: list[Any]) -> None:
    assert main(["zoo_of_models:make_mlp", "--input", "8x8", "--devices", "cpu,cpu,cpu", "--hardware", "cpu"]) == 0
    model, args, kwargs, settings = asked[0]
    assert [str(worker) for worker in settings.workers] == ["cpu"] * 3
    # What was not given is left to planning, as in `fxpipe.plan`.
    assert (settings.schedule, settings.checkpoint, settings.balance, settings.chunks) == ("1f1b", "auto", "auto", 12)
    assert ([x.shape for x in args], kwargs, model.training) == ([(8, 8)], {}, True)
    line = "--devices cpu,cpu --chunks 3 --schedule gpipe --checkpoint always --balance 3,5 --eval --optimizer-state 0"
    assert main(["zoo_of_models:make_net", "--input", "zoo_of_models:dict_inputs", *line.split()]) == 0
    model, args, kwargs, settings = asked[-1]
    assert (settings.schedule, settings.checkpoint, settings.balance, settings.chunks) == ("gpipe", "always", (3, 5), 3)
    assert settings.optimizer_state == 0
    assert (args, [*kwargs], model.training) == ((), ["tokens", "scale"], False)


@pytest.mark.parametrize("target", ["zoo_of_models:Zoo.small", "zoo_of_models.py:ready", "./zoo_of_models.py:make_mlp"])
def test_targets(target: str, model_file: Path) -> None:
    assert main([target, "--input", "8x8", "--devices", "cpu,cpu", "--hardware", "cpu"]) == 0


MISTAKES = {
    "no_target": ("", "the following arguments are required: TARGET"),
    "form_of_target": ("zoo_of_models", "'zoo_of_models': expected module:factory or path/to/file.py:factory"),
    "module": ("zoo_of_model:make_mlp", "no module named 'zoo_of_model'", "did you mean zoo_of_models?"),
    "file": ("zoo_of_model.py:make_mlp", "no file 'zoo_of_model.py'", "did you mean zoo_of_models.py?"),
    "factory": ("zoo_of_models:make_mpl", "zoo_of_models has no 'make_mpl'; did you mean make_mlp"),
    "factory_of_file": ("zoo_of_models.py:qqq", "zoo_of_models.py has no 'qqq'; it has Net, Zoo,", "make_mlp"),
    "nested_factory": ("zoo_of_models:Zoo.smal", "zoo_of_models has no 'Zoo.smal'; did you mean small?"),
    "raises": ("zoo_of_models:make_error", "calling zoo_of_models:make_error raised KeyError: 'width'"),
    "no_module": ("zoo_of_models:make_wrong", "zoo_of_models:make_wrong returned a list, expected a torch.nn.Module"),
    "no_function": ("zoo_of_models:number", "zoo_of_models:number is an int, not a function"),
    "input": ("zoo_of_models:make_mlp --input 8*8", "argument --input: '8*8': expected sizes (8x3x64x64)"),
    "devices": ("zoo_of_models:make_mlp --devices 0", "argument --devices: '0': expected a number"),
    "balance": ("zoo_of_models:make_mlp --balance 3,,4", "argument --balance: '3,,4': expected block, counts"),
    "device": ("zoo_of_models:make_mlp --devices cpu,gpu", "--devices: 'gpu' is no device"),
    "chunks": ("zoo_of_models:make_mlp --chunks 0", "argument --chunks: '0': expected a whole number"),
    "schedule": ("zoo_of_models:make_mlp --schedule 1b1f", "--schedule: invalid choice: '1b1f'", "gpipe", "1f1b"),
    "chimera": ("zoo_of_models:make_mlp --schedule chimera", "--schedule chimera is bidirectional", "Use 'dualpipev'"),
    "option": ("zoo_of_models:make_mlp --chunk 2", "unrecognized arguments: --chunk 2 (see --help)"),
    "code_and_json": (
        "zoo_of_models:make_mlp --code 1 --json",
        "--code prints the code of a stage and nothing else; leave --json out",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line(name: str, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, *expected = MISTAKES[name]
    found = refusal(line.split(), capsys)
    assert all(part in found for part in expected), found


def test_module_that_cannot_be_imported(tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in [
        ("import not_there_at_all", "raised ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def make(:", "raised SyntaxError"),
        ("raise SystemExit('usage: train.py DATA')", "raised SystemExit: usage: train.py DATA"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ]:
        (tmp_path / "not_to_be_imported.py").write_text(text)
        assert "importing not_to_be_imported " + expected in refusal(["not_to_be_imported:make"], capsys)
        assert "running not_to_be_imported.py " + expected in refusal(["not_to_be_imported.py:make"], capsys)
    assert "no module named 'not_a_package'" in refusal(["not_a_package.models:make"], capsys)


def test_a_file_imports_its_neighbours_and_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "neighbour_of_queue.py").write_text("width = 4")
    # Named after a module of the standard library, which it must not replace.
    (tmp_path / "queue.py").write_text(
        "import neighbour_of_queue, torch\nprint('running')\n"
        "def make(): return torch.nn.Linear(neighbour_of_queue.width, 1)\ndef inputs(): return torch.ones(2, 4)\n"
    )
    file = tmp_path / "queue.py"
    argv = [f"{file}:make", "--input", f"{file}:inputs", "--devices", "cpu", "--chunks", "2", "--hardware", "cpu"]
    assert main([*argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["chunks"] == 2  # what the user's code prints is elsewhere
    assert captured.err == "running\n"
    assert "Queue" in dir(sys.modules["queue"])


def test_refusals_of_fxpipe_end_in_one_line(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_planning(monkeypatch, PartitionError("cannot be cut:\n  - stage 0 has no node\n  - stage 1 has no node"))
    line = refusal(["zoo_of_models:make_mlp", "--input", "8x8", "--devices", "cpu,cpu"], capsys)
    assert line == "fxpipe.inspect: cannot be cut: - stage 0 has no node - stage 1 has no node"


def test_exceptions_of_the_model_end_in_one_line(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["zoo_of_models:make_mlp", "--input", "8x9", "--devices", "cpu,cpu"], capsys)
    assert "the model raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 8x16)" in line
    line = refusal(["zoo_of_models:make_mlp", "--devices", "cpu,cpu"], capsys)
    assert "without inputs; give each an --input of its own, as in --input input=8x64" in line
    line = refusal(["zoo_of_models:make_mlp", "--input", "8x8", "8x8"], capsys)
    assert "unrecognized arguments: 8x8; an input has an --input of its own" in line


def test_a_model_of_two_inputs_tells_how_they_are_given() -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return image + text

    one = make_arguments([InputOption(InputShape((8, 8), "float32"))])
    assert inputs_advice(Two(), one).endswith("as in --input image=8x64 --input text=8x64")
    assert inputs_advice(nn.Linear(8, 8), one) == "on these inputs"


def test_a_bug_in_fxpipe_is_not_laid_on_the_model(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_planning(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["zoo_of_models:make_mlp", "--input", "8x8", "--devices", "cpu,cpu"])


@pytest.mark.parametrize(
    ("given", "set_to"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_of_the_command_do_not_spin_unless_they_are_told_to(given: dict[str, str], set_to: str | None) -> None:
    program = "import os, fxpipe.inspect.cli as p; p.set_up_process(); print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))} | given
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(set_to)


def test_command_prints_a_plan(model_file: Path) -> None:
    root = str(Path(fxpipe.__file__).parents[1])
    command = [sys.executable, "-m", "fxpipe.inspect", "zoo_of_models:make_net", "--input", "8x5:int64"]
    done = subprocess.run(
        [*command, "--devices", "cpu,cpu", "--chunks", "4"], capture_output=True, text=True, env={"PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 stages, 4 micro-batches of at most 2 samples\n")
    assert "step " in done.stdout
    assert "the model says something" not in done.stdout
