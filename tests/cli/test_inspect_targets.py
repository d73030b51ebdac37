"""What the command can be pointed at: factories with arguments, models that transformers ships, models without memory,
saved plans."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inspected import make_plan, refusal

from fxpipe.errors import ArgumentError
from fxpipe.inspect.cli import main
from fxpipe.inspect.cli_options import as_options, parse_request, parse_subject
from fxpipe.inspect.targets import (
    InputOption,
    InputShape,
    ModelType,
    Target,
    example_inputs,
    load_hugging_face_model,
    load_model,
    make_arguments,
    parse_keyword,
    parse_model_type,
    vocabulary_size,
)

FACTORIES = """
import torch
from torch import nn

def make(width, depth=2, *, name="plain", bias=True):
    if depth > 9:
        raise ValueError("too deep")
    layers = [nn.Linear(width, width, bias=bias) for _ in range(depth)]
    return nn.Sequential(*layers) if name == "plain" else nn.ModuleDict()

def anything(**kwargs):
    return nn.Linear(len(kwargs), 1)

def nothing():
    return nn.Linear(2, 1)

ready = nn.Linear(2, 2)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 4)

    def forward(self, *, tokens, scale):
        return self.embed(tokens) * scale

def make_scale():
    return torch.ones(8, 1, 1)
"""
TINY_GPT = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 12}


@pytest.fixture
def factories(tmp_path: Path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=4", 4),
        ("x=0.1", 0.1),
        ("x=true", True),
        ("x=null", None),
        ("x=small", "small"),
        ("x='4'", "4"),
        ("x=[8,16]", [8, 16]),
        ("x=(3,3)", (3, 3)),
        ('x={"a": [1]}', {"a": [1]}),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=__import__('os')", "__import__('os')"),  # text, and nothing that is run
    ],
)
def test_values_are_json_or_literals_or_text(text: str, value: Any) -> None:
    name, found = parse_keyword(text)
    assert name == "x"
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["x", "=4", "2x=4", "a-b=1"])
def test_what_is_no_keyword(text: str) -> None:
    with pytest.raises(ArgumentError, match="expected name=value, as in depth=4"):
        parse_keyword(text)


def test_arguments_reach_the_factory(factories: str) -> None:
    model = load_model(Target(factories, "make"), {"width": 3, "depth": 4, "bias": False})
    assert len(model) == 4
    assert model[0].bias is None
    assert load_model(Target(factories, "anything"), {"a": 1, "b": 2}).in_features == 2
    found = parse_request(["m:make", "--kwargs", "width=3", "name=small", "--kwargs", "flag=true"]).kwargs
    assert found == {"width": 3, "name": "small", "flag": True}


MISTAKES = {
    "unknown": ("make width=2 dept=3", "no parameter 'dept'; did you mean depth?; it has (width, depth=2, name="),
    "missing": ("make depth=3", ":make needs 'width'; give --kwargs width=...; it has (width, depth=2"),
    "none": ("nothing depth=3", "no parameter 'depth'; it has none"),
    "twice": ("make width=2 width=3", "--kwargs: 'width' is given twice"),
    "form": ("make width", "argument --kwargs: 'width': expected name=value, as in depth=4"),
    "raises": ("make width=2 depth=12", "raised ValueError: too deep", "factories.py:7)"),
    "ready": ("ready width=2", "ready is a model, not a function that makes one"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_arguments_end_in_one_line(name: str, factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, *expected = MISTAKES[name]
    factory, *kwargs = line.split()
    found = refusal([f"{factories}:{factory}", "--kwargs", *kwargs], capsys)
    assert all(part in found for part in expected), found


def test_inputs_by_name(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ["--input", "tokens=8x3:int64", "--input", f"scale={factories}:make_scale"]
    assert main([f"{factories}:Named", *inputs, "--devices", "2", "--chunks", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [stage["index"] for stage in document["stages"]] == [0, 1]
    line = refusal([f"{factories}:Named", *inputs, "--input", "tokens=8x3:int64"], capsys)
    assert "--input tokens=8x3:int64: argument 'tokens' was given by an --input before it" in line


def test_integers_below_a_vocabulary_and_inputs_without_values() -> None:
    given = [
        InputOption(InputShape((64, 8), "int64"), "ids"),
        InputOption(InputShape((64,), "bool")),
        InputOption(InputShape((2, 3), "bfloat16")),
    ]
    arguments = make_arguments(given, integers_below=50)
    ids = arguments.kwargs["ids"]
    assert 40 < ids.max() < 50
    assert arguments.args[0].dtype is torch.bool
    assert 16 < arguments.args[0].sum() < 48
    empty = make_arguments(given, on_meta=True)
    assert {tensor.device.type for tensor in (*empty.args, *empty.kwargs.values())} == {"meta"}
    assert empty.args[1].dtype is torch.bfloat16


def test_subjects() -> None:
    assert parse_subject("hf:gpt2") == ModelType("gpt2")
    assert parse_subject("a/plan.json") == Path("a/plan.json")
    assert parse_subject("models:make") == Target("models", "make")
    with pytest.raises(ArgumentError, match=r"expected module:factory or .*, hf:gpt2 .* plan.json"):
        parse_subject("models")
    with pytest.raises(ArgumentError, match="as in hf:gpt2"):
        parse_subject("hf:")


@pytest.mark.parametrize(
    ("name", "kwargs", "made", "inputs"),
    [
        ("gpt2", TINY_GPT, "GPT2LMHeadModel", ["input_ids=8x12:int64"]),
        (
            "t5",
            {"num_layers": 1, "d_model": 16, "d_ff": 16, "vocab_size": 30},
            "T5ForConditionalGeneration",
            ["input_ids=8x128:int64", "decoder_input_ids=8x128:int64"],
        ),
        (
            "vit",
            {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 32, "num_channels": 1},
            "ViTForImageClassification",
            ["pixel_values=8x1x32x32:float32"],
        ),
    ],
)
def test_a_type_is_made_as_it_is_trained(name: str, kwargs: dict[str, Any], made: str, inputs: list[str]) -> None:
    pytest.importorskip("transformers")
    model = load_hugging_face_model(ModelType(name), kwargs)
    assert type(model).__name__ == made
    assert model.training
    found = example_inputs(model)
    assert [str(given) for given in found] == inputs
    arguments = make_arguments(found, integers_below=vocabulary_size(model))
    assert model(**arguments.kwargs)[0].shape[0] == 8
    assert example_inputs(model, 20)[0].value.sizes[0] == 20


def test_a_type_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    kwargs = ["--kwargs", *(f"{name}={value}" for name, value in TINY_GPT.items())]
    argv = ["hf:gpt2", *kwargs, "--devices", "2", "--chunks", "2"]
    assert main([*argv, "--hardware", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("inputs input_ids=8x12:int64, drawn; give others with --input\n\n2 stages")
    assert "tied parameters\n- transformer.wte.weight = lm_head.weight, 2.5 KiB, in stages 0 and 1" in printed
    argv = [*argv, "--meta", "--hardware", "h200", "--input", "input_ids=4x6:int64", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimated_for"] == "NVIDIA H200 SXM"
    assert document["devices"] == ["cuda:0", "cuda:1"]
    assert document["inputs"] == []
    assert document["simulation"]["devices"][0]["limit_bytes"] > 100 * 2**30


def test_types_and_fields_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    line = refusal(["hf:gpt22"], capsys)
    assert "has no model type 'gpt22'; did you mean gpt2" in line
    assert "; it has " in refusal(["hf:qqqqqqqq"], capsys)
    assert "did you mean gpt2" in refusal(["hf:gpt2-medium"], capsys)
    assert "or a folder with its config.json; nothing is downloaded" in refusal(["hf:openai/gpt2"], capsys)
    line = refusal(["hf:gpt2", "--kwargs", "n_layers=2"], capsys)
    assert "the configuration of hf:gpt2 has no field 'n_layers'; did you mean n_layer" in line
    line = refusal(["hf:gpt2", "--kwargs", "n_embd=10", "n_head=3"], capsys)
    assert "hf:gpt2: AutoModelForCausalLM cannot be made of its configuration: ValueError" in line


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert refusal(["hf:gpt2"], capsys).endswith("hf:gpt2 needs transformers: pip install transformers")


def test_a_saved_plan_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    make_plan(3, 8).save(path)
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 stages, 8 micro-batches")
    assert "a step as simulated, 1f1b, 8 micro-batches" in printed
    assert main([str(path), "--schedule", "gpipe"]) == 0
    assert "a step as simulated, gpipe, 8 micro-batches" in capsys.readouterr().out
    assert main([str(path), "--code", "2"]) == 0
    assert capsys.readouterr().out == "def stage_2(x): ...\n"


def test_what_a_saved_plan_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    make_plan(2).save(path)
    needing = ("--devices 4", "--input 8x8", "--meta", "--balance block", "--sweep", "--leaf a", "--dynamic x:1=s")
    for option in needing:
        name, line = option.split()[0], refusal([str(path), *option.split()], capsys)
        assert line == (
            f"fxpipe.inspect: {name} needs the model, and {path} is a plan that is made already; give the factory"
        )
    assert "--data-parallel auto needs the model" in refusal([str(path), "--data-parallel", "auto"], capsys)
    assert "--code 2: no such stage; stages are 0 to 1" in refusal([str(path), "--code", "2"], capsys)
    assert "--code -1: no such stage" in refusal([str(path), "--code", "-1"], capsys)
    assert f"{tmp_path}/no.json: cannot be read: No such file" in refusal([f"{tmp_path}/no.json"], capsys)
    path.write_text("{}")
    assert "is no plan of fxpipe" in refusal([str(path)], capsys)


def test_refusals_of_planning_name_the_option(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_options("pin['0']=7: there are 2 devices") == "--pin['0']=7: there are 2 devices"
    assert as_options("leaf_modules: no module") == "--leaf: no module"
    assert as_options("a plan cannot be saved: it=2") == "a plan cannot be saved: it=2"
    assert as_options("--devices 3: stages=3") == "--devices 3: stages=3"
    advice = "chunks=0 is none; use chunks=1, schedule='1f1b' or memory_limit=['1GiB', 2] (optimizer_state)"
    assert as_options(advice) == (
        "--chunks 0 is none; use --chunks 1, --schedule 1f1b or --memory-limit 1GiB,2 (--optimizer-state)"
    )
    argv = [f"{factories}:make", "--kwargs", "width=2", "--input", "4x2", "--pin", "0=gpu"]
    assert "inspect: --pin['0']: 'gpu' is no device of torch's" in refusal(argv, capsys)
    assert "--pin: '0' is given twice" in refusal([*argv, "--pin", "0=1"], capsys)
    argv = [f"{factories}:make", "--kwargs", "width=2", "--input", "4x2", "--memory-limit", "lots"]
    assert "inspect: --memory-limit lots is no number of bytes" in refusal(argv, capsys)
    assert "TARGET goes before --kwargs" in refusal(["--kwargs", "width=2", f"{factories}:make"], capsys)


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
TOO_LARGE = f"""
import torch
from torch import nn

class InForward(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x):
        if x.device.type != "meta" and not torch._guards.detect_fake_mode([x]):
            raise self.error
        return torch.relu(self.layer(torch.relu(self.layer(x))))

def in_forward():
    return InForward(RuntimeError({ALLOCATOR!r}))

def in_python():
    return InForward(MemoryError())

def while_made():
    if torch.empty(0).device.type == "meta":
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    raise RuntimeError({ALLOCATOR!r})
"""


@pytest.mark.parametrize("name", ["in_forward", "in_python", "while_made"])
def test_a_model_too_large_for_this_machine_is_answered_with_meta(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "too_large.py").write_text(TOO_LARGE)
    line = [f"too_large.py:{name}", "--input", "8x4", "--devices", "2", "--no-progress"]
    found = refusal(line, capsys)
    assert f"too_large.py:{name}: the memory here does not hold the model and its inputs" in found
    assert "give --meta to plan it without values, and --hardware" in found
    assert ("where 4.0 TiB were asked for at once" in found) == (name != "in_python")
    assert main([*line, "--meta", "--hardware", "h100"]) == 0


READS_VALUES = """
import torch
from torch import nn

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.device.type == "meta" or torch._guards.detect_fake_mode([x]):
            raise RuntimeError("Tensor.item() cannot be called on meta tensors")  # as libraries do that catch others
        return self.layer(x)
"""


def test_a_model_that_reads_values_is_answered_without_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reading.py").write_text(READS_VALUES)
    line = ["reading.py:Reading", "--input", "8x4", "--devices", "2", "--hardware", "h100", "--meta", "--no-progress"]
    found = refusal(line, capsys)
    assert "cannot be called on meta tensors" in found
    assert "if forward reads values there, leave --meta out" in found


LOSSES = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))

class Halved(nn.Module):
    def forward(self, out, target):
        return (out - target).square().mean() / 2

half = 0.5

def fails(out, target):
    raise OSError("no disk")
"""
LOSS_RUN = ("losses.py:make", "--input", "4x4", "--devices", "cpu,cpu", "--chunks", "2")


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize(
    ("loss", "target"),
    [("torch.nn.functional:cross_entropy", "4:int64"), ("losses.py:Halved", "4x8"), ("torch.nn:MSELoss", "4x8")],
)
def test_a_loss_is_a_part_of_the_plan(loss, target, capsys):
    assert main([*LOSS_RUN, "--loss", loss, "--target", target, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["loss_seconds"] > 0 for stage in stages] == [False, True]


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "4:int64"), "--target without --loss"),
        (("--loss", "losses.py:half"), "--loss losses.py:half is a float, not a function"),
        (("--loss", "losses.py:fails", "--target", "4x8"), "--loss raised OSError: no disk on the model's output"),
        (("--loss", "torch.nn:MSELoss", "--target", "3x8"), "the inputs hold 4 samples"),
        (("--loss", "torch.nn:MSELoss", "--target", "t=4x8"), "--target t=4x8:float32: expected one value"),
        (("--loss", "torch.nn:NoLoss"), "torch.nn has no 'NoLoss'"),
    ],
)
def test_a_loss_that_cannot_be_taken_is_refused(arguments, message, capsys):
    assert message in refusal([*LOSS_RUN, *arguments], capsys)


def test_a_folder_with_a_configuration_is_a_model_with_random_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install fxpipe[dev]")
    transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32).save_pretrained(tmp_path / "own")
    model: Any = load_hugging_face_model(parse_model_type(f"hf:{tmp_path / 'own'}"), {"n_head": 4})
    assert (type(model).__name__, model.config.n_embd, model.config.n_head) == ("GPT2LMHeadModel", 16, 4)


def test_arguments_with_commas_are_asked_for_with_spaces() -> None:
    with pytest.raises(ArgumentError, match=r"separate arguments by spaces: depth=8 width=32"):
        parse_keyword("depth=8,width=32")
    assert parse_keyword("sizes=[8,16]") == ("sizes", [8, 16])
    assert parse_keyword("text=a,b") == ("text", "a,b")
