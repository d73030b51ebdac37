"""Threads that plan end where the interpreter does: at a cancellation point, and never inside torch."""

import threading

import pytest

from fxpipe.utils import locks
from fxpipe.utils.progress import progress

# `threading.excepthook` passes over a SystemExit; pytest's does not.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def _alive(monkeypatch):
    """No test leaves its thread as the one that ends the interpreter."""
    yield
    locks._exiting_thread = None
    locks._cancelled.clear()


def test_a_thread_that_plans_ends_at_the_next_step_of_a_pass():
    begun, steps = threading.Event(), []

    def plan():
        with locks.planning_block(), progress("nodes", None) as step:
            while True:
                begun.set()
                steps.append(step())

    thread = threading.Thread(target=plan)
    thread.start()
    assert begun.wait(20)
    locks.stop_planning_threads()
    assert not thread.is_alive()
    assert steps


def test_a_thread_that_begins_to_plan_while_the_interpreter_ends_does_not():
    locks.stop_planning_threads()
    done = []

    def plan():
        with locks.planning_block():
            done.append(True)

    thread = threading.Thread(target=plan)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not done


def test_a_thread_in_plain_python_is_broken_off_after_a_while(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.05)
    begun = threading.Event()

    def search():
        with locks.planning_block():
            begun.set()
            while True:
                pass

    thread = threading.Thread(target=search)
    thread.start()
    assert begun.wait(20)
    locks.stop_planning_threads()
    thread.join(20)
    assert not thread.is_alive()


def test_the_thread_that_ends_the_interpreter_may_go_on_planning():
    locks.stop_planning_threads()
    with locks.planning_block():
        locks.cancellation_point()
