"""The backend is compiled once, whoever asks for it, and only where there is a compiler."""

import threading
import time
from pathlib import Path

import pytest

from simulated import build


@pytest.fixture
def links(monkeypatch, tmp_path):
    """The commands that have linked a library; a compiler that takes its time and leaves empty files."""
    commands = []

    def run(command):
        time.sleep(0.05)
        Path(command[command.index("-o") + 1]).touch()
        if "-shared" in command:
            commands.append(command)

    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(build.cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setattr(build, "_compiler", lambda: "c++")
    return commands


def test_who_asks_at_the_same_time_gets_one_library(links):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(build.library())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(links) == 1
    assert len({*paths}) == 1
    assert paths[0].exists()


def test_other_sources_and_another_torch_are_another_library(links, monkeypatch, tmp_path):
    first = build.library()
    monkeypatch.setattr(build.torch, "__version__", "3.0")
    second = build.library()
    source = tmp_path / "more.cpp"
    source.write_text("int more;")
    monkeypatch.setattr(build, "SOURCES", [*build.SOURCES, source])
    assert len({first, second, build.library()}) == len(links) == 3


def test_without_a_compiler_the_reason_says_so(links, monkeypatch):
    monkeypatch.setattr(build, "_compiler", lambda: None)
    with pytest.raises(build.CompilerMissingError, match="not on the path"):
        build.library()
