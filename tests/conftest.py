"""What holds for every test: seeded, one thread per operation, and no worker of a pipe left behind."""

import gc
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from helpers import devices
from helpers.ranks import Ranks

# A red test is red for everyone and every time; no deadline, since the first example of a test may warm torch up.
hypothesis.settings.register_profile("fxpipe", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fxpipe")

LONG_TESTS = Path(__file__).with_name("long_tests.txt")  # functions that take long; tools/long_tests.py writes it
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
GRACE = 2.0  # seconds that the workers of a pipe dropped at the end of a test have to end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simulated", action="store_true", help="run the tests that run on simulated accelerators")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--simulated"):
        devices.simulate()  # before the first backward, and before tests are collected that ask for devices


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {torch.cuda.device_count()} CUDA devices"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = set(LONG_TESTS.read_text(encoding="utf-8").split())
    for item in items:
        if item.nodeid.removeprefix("tests/").partition("[")[0] in long:
            item.add_marker("long")
    if devices.is_simulated():  # which a process has for good: it runs nothing else
        here = [item for item in items if any(map(item.get_closest_marker, ("simulated", "anywhere")))]
        config.hook.pytest_deselected(items=[item for item in items if item not in here])
        items[:] = here
        if reason := devices.why_not_simulated():
            for item in items:
                item.add_marker(pytest.mark.skip(reason=reason))
        return
    apart = pytest.mark.skip(reason="runs in a session of its own: pytest --simulated")
    for item in items:
        if item.get_closest_marker("simulated"):
            item.add_marker(apart)
    found = torch.cuda.device_count()
    for marker, needed in (("cuda", 1), ("multi_gpu", 2)):
        if found < needed:
            skip = pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {found} found")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def simulated() -> Iterator[Any]:
    """The simulated machine, where there is one. Whatever was not ordered in a test fails it."""
    machine = devices.simulated_machine()
    if machine is None:
        yield None
        return
    machine.begin()
    yield machine
    races = machine.races()
    assert not races, "not ordered on the simulated devices:\n  " + "\n  ".join(races)


@pytest.fixture(autouse=True)
def _measured_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any test depends on how well times are known."""
    monkeypatch.setattr("fxpipe.planning.options.parse.PROFILE_BUDGET", 0.05)
    if devices.is_simulated():  # where a copy takes long, and tells nothing of links
        monkeypatch.setattr("fxpipe.hardware._LARGE_COPY", 1 << 16)


@pytest.fixture(autouse=True)
def _as_wide_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed fits the window that a variable of the environment tells."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _on_one_thread() -> None:
    """So that what the fixtures of a module compute has the bits of its tests."""
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Thousands of tests, and torch, are there to the end: nobody looks through them again for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Processes of a file's own, which have run nothing of other files."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """As `two_ranks`."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def only_new_objects() -> None:
    """Garbage collection, and who asks it for objects, looks at none that is older than the test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded_on_one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one without a window, for pages that are looked at. Skips where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install fxpipe[dev]"
    )
    path = os.environ.get("FXPIPE_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path, and FXPIPE_CHROMIUM is not set")
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=options)
        yield launched
        launched.close()


@pytest.fixture(autouse=True)
def _no_worker_left() -> Iterator[None]:
    before = _workers()  # a test that failed may leave some, since pytest keeps its frames: not the next test's fault
    yield
    if _workers() - before:
        gc.collect()  # a pipe that is dropped takes its threads along (only here: with torch loaded it takes 0.1 s)
    deadline = time.monotonic() + GRACE
    for worker in _workers() - before:
        worker.join(max(0.0, deadline - time.monotonic()))
    left = sorted(worker.name for worker in _workers() - before)
    assert not left, f"threads still alive {GRACE:.0f} s after the test: {left}; close the pipe, or find what holds it"


def _workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fxpipe")}
