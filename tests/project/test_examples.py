"""The examples run, small, and say what they show. Each compares itself with the plain model."""

import importlib.util
import os
import runpy
import socket
import subprocess
import sys

import pytest
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
IN_TWO = ("--steps", "1", "--chunks", "2")  # as little as shows that it trains


def run(monkeypatch, capsys, name, *options):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def need(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install fxpipe[zoo]")


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize(
    ("model", "devices", "shown"),
    [
        ("gpt2", "cpu,cpu", "transformer.wte.weight = lm_head.weight"),
        ("t5", "cpu,cpu,cpu", "shared.weight = encoder"),
        ("vit", "cpu,cpu", "model.safetensors"),
        ("moe", "cpu,cpu", "loss, plain"),
    ],
)
def test_models_of_transformers_train_as_they_do_alone(monkeypatch, capsys, model, devices, shown):
    text = run(monkeypatch, capsys, "huggingface.py", model, "--devices", devices, "--steps", "2")
    assert shown in text
    assert "largest difference in 2 steps" in text
    assert "saved: config.json" in text


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_trainer_takes_a_pipe(monkeypatch, capsys, steps):
    text = run(monkeypatch, capsys, "huggingface.py", "vit", "--trainer", "--steps", str(steps))
    assert "eval_loss" in text
    assert f"largest difference in {steps} steps" in text


def test_a_model_without_values_is_planned_for_other_hardware(monkeypatch, capsys, tmp_path):
    options = ["--layers", "2", "--devices", "2", "--batch", "8", "--chunks", "4", "--length", "64"]
    text = run(monkeypatch, capsys, "plan_70b.py", *options, "--save", str(tmp_path / "plan.json"))
    assert "G parameters, none of which has a value" in text
    assert "NVIDIA H200" in text
    assert "zero_bubble_2p" in text
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("options", [IN_TWO, pytest.param(("--steps", "2"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["resnet.py", "unet.py", "gpt.py", "contrastive.py"])
def test_models_written_by_hand_train_as_they_do_alone(monkeypatch, capsys, name, options):
    text = run(monkeypatch, capsys, name, *options)
    assert "loss, plain" in text


def test_a_script_of_torchgpipe_before_and_after(monkeypatch, capsys):
    text = run(monkeypatch, capsys, "from_torchgpipe.py", "--steps", "3")
    assert "largest difference" in text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "options",
    [IN_TWO, ("--compile", "aot_eager", *IN_TWO), pytest.param(("--compile", "aot_eager"), marks=pytest.mark.slow)],
)
def test_mixed_precision_and_compiled_stages(options, monkeypatch, capsys):
    text = run(monkeypatch, capsys, "precision_and_compile.py", "--amp", "bfloat16", *options)
    assert "loss, bfloat16" in text


@pytest.mark.parametrize("chunks", ["2", pytest.param("8", marks=pytest.mark.slow)])
def test_a_gpt_trains_over_two_processes(tmp_path, chunks):
    """Started as by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(EXAMPLES / "torchrun_gpt.py"), "--steps", "1", "--chunks", chunks]
    command += ["--checkpoint", str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env=group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "schedule 1f1b" in outputs[0]
    (loss,) = {line.split()[-1] for output in outputs for line in output.splitlines() if line.startswith("rank")}
    assert float(loss) < 6
    assert (tmp_path / ".metadata").exists()


@pytest.mark.filterwarnings("ignore:::diffusers", "ignore:::monai")
@pytest.mark.parametrize("options", [IN_TWO, pytest.param(("--steps", "2"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("task", "library"), [("diffusion", "diffusers"), ("medical", "monai")])
def test_u_nets_of_libraries_train_as_they_do_alone(monkeypatch, capsys, task, library, options):
    need(library)
    text = run(monkeypatch, capsys, "unets.py", task, *options)
    assert f"largest difference in {options[1]} steps" in text


def test_no_example_is_forgotten():
    """Each is run by a test."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    examples = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(examples) > 11
    assert not [name for name in examples if name not in text]
