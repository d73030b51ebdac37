"""Files that the command writes, and what it does not import, finish or hide."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.inspected import make_plan, refusal

import fxpipe
from fxpipe.inspect.cli import main
from fxpipe.inspect.step_summary import one_device_text
from fxpipe.planning.plans.data import Portal
from fxpipe.planning.plans.retarget import resize_plan

ROOT = str(Path(fxpipe.__file__).parents[1])


@pytest.fixture
def saved(tmp_path: Path) -> str:
    make_plan(3, 6).save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_pictures_of_a_saved_plan(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"timeline": "t.svg", "graph": "g.svg", "report": "r.html"}
    argv = [part for name, file in outputs.items() for part in (f"--{name}", str(tmp_path / file))]
    assert main([saved, *argv]) == 0
    assert capsys.readouterr().out.startswith("3 stages")
    for file in outputs.values():
        assert "<svg" in (tmp_path / file).read_text()
    assert "plan.json, 1f1b, 6 micro-batches" in (tmp_path / "t.svg").read_text()
    assert str(tmp_path) not in (tmp_path / "r.html").read_text()
    timeline, copied = tmp_path / "t.json", tmp_path / "p.json"
    assert main([saved, "--json", "--timeline", str(timeline), "--save", str(copied), "--schedule", "gpipe"]) == 0
    assert json.loads(timeline.read_text())["traceEvents"]
    captured = capsys.readouterr()
    json.loads(captured.out)  # which has nothing else
    assert captured.err.splitlines() == [
        f"fxpipe.inspect: wrote a timeline to {timeline}",
        f"fxpipe.inspect: wrote a plan to {copied}",
    ]


def test_all_can_be_read_in_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    portals = tuple(Portal(f"encoder_block_{k}_conv", 0, 2, 1024) for k in range(3))
    monkeypatch.chdir(tmp_path)  # paths are as long as they are
    plan = "plan.json"
    make_plan(3, 6, portals=portals).save(plan)
    for options in ([], ["--tune"], ["--tune", "--all"], ["--schedule", "zero_bubble"]):
        assert main([plan, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80] == [], options
        assert any("peak" in line or "memory" in line for line in lines)


def test_the_rest_of_a_search_is_shown_by_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "plan.json")
    make_plan(3, 16).save(saved)
    assert main([saved, "--tune"]) == 0
    shown = capsys.readouterr().out
    assert ".rows" not in shown
    assert "--all shows" in shown
    assert main([saved, "--tune", "--all"]) == 0
    everything = capsys.readouterr().out
    assert "--all" not in everything
    assert len(everything.splitlines()) > len(shown.splitlines())
    assert "--all shows every row of --tune" in refusal([saved, "--all"], capsys)


def test_a_search_is_compared_with_one_device() -> None:
    plan = replace(make_plan(2), estimated_for="NVIDIA H100 SXM")
    worse = fxpipe.tune(plan, schedules=["gpipe"], chunks=[1])  # one stage after the other
    text = _words(one_device_text(worse))
    assert "for the mini-batch at once: 1.00 times the chosen step, so that a pipeline is not worth it here" in text
    assert "let 2 devices share the mini-batch, each with a copy" in text
    better = fxpipe.tune(plan, schedules=["1f1b"], chunks=[4])
    alone = sum(stage.seconds for stage in resize_plan(plan, better.batch).stages)
    text = _words(one_device_text(better))
    assert f"the chosen way is {alone / better.best.step_seconds:.2f} times as fast, on 2 devices" in text


@pytest.mark.parametrize(
    ("limit", "message"),
    [(60, "for 4 micro-batches, one after the other"), (40, "no room for the model, not even with a micro-batch at a")],
)
def test_one_device_holds_what_it_can(limit: int, message: str) -> None:
    stages = tuple(replace(stage, memory_limit=limit * 2**20) for stage in make_plan(2).stages)
    plan = replace(make_plan(2), stages=stages, estimated_for="NVIDIA H100 SXM")
    tuning = fxpipe.tune(plan, schedules=["1f1b"], chunks=[4])
    assert message in _words(one_device_text(tuning))


def _words(text: str) -> str:
    return " ".join(text.split())


MISTAKES = {
    "suffix": ("--timeline {0}/t.bmp", "--timeline: a timeline cannot be saved to", ".bmp", ".svg, .json"),
    "no_suffix": ("--report {0}/report", "--report: a report", "a suffix must name the format", ".html"),
    "graph_as_png": ("--graph {0}/g.png", "--graph: a graph", ".svg"),
    "folder": ("--graph {0}/nowhere/g.svg", "there is no directory"),
    "directory": ("--report {0}/folder.html", "it is a directory"),
    "no_folder": ("--save {0}/file/plan.json", "--save: a plan", "is no directory"),
    "twice, spelt another way": (
        "--save {0}/a.json --timeline {0}/../{0.name}/a.json",
        "/a.json: --timeline is to be written there",
    ),
    "twice": ("--timeline {0}/a.svg --graph {0}/a.svg", "--graph {0}/a.svg: --timeline is to be written there"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_places_are_looked_at_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxpipe.inspect.run.load_requested_model", lambda request: pytest.fail("it has begun to work"))
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    line, *expected = MISTAKES[name]
    found = refusal(["models:make", "--devices", "2", *line.format(tmp_path).split()], capsys)
    assert all(part.format(tmp_path) in found for part in expected), found


def test_help_and_import_take_nothing_heavy_along() -> None:
    code = (
        "import sys, fxpipe\nfrom fxpipe.inspect.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n    "
        "print([name for name in ('torch', 'sympy', 'matplotlib', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ROOT}
    )
    assert done.stdout.endswith("[]\n")
    for example in ("hf:gpt2", "--sweep", "--tune", "--report report.html"):
        assert example in done.stdout


def test_an_interrupted_process_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time\ndef make():\n    print('begun', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "fxpipe.inspect", "slow.py:make", "--devices", "2"],
        cwd=tmp_path,
        env={"PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell ignores for its background
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "fxpipe.inspect: interrupted\n")


def test_a_name_that_the_output_has_no_letters_for_is_marked(tmp_path: Path) -> None:
    make_plan(3, portals=(Portal("größe", 0, 2, 1024),)).save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "fxpipe.inspect", "plan.json"],
        cwd=tmp_path,
        env={"PYTHONPATH": ROOT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr??e" in done.stdout
