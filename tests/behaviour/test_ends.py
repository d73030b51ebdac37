"""The ends of processes with a pipe: status 0 after success, the user's own error after failure, and no noise."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from helpers.forked_scripts import ForkServer
from helpers.paths import ROOT

pytestmark = pytest.mark.slow  # processes

SECONDS = 300.0
BEGIN = """
    import atexit, gc, os, signal, sys, threading, time
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    import fxpipe.planning.options.parse
    import fxpipe.optim

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fxpipe.planning.options.parse.PROFILE_BUDGET = 0.05
    x = torch.randn(8, 4)
    devices, rank = ["cpu", "cpu"], 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        devices, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def make(schedule="1f1b", **options):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        options = {"example_args": (x,), "hardware": "cpu", "progress": False} | options
        return fxpipe.pipeline(model, devices, 2, schedule=schedule, **options)

    def step(pipe, loss_fn=F.mse_loss):
        return pipe.forward_backward(x, target=x, loss_fn=loss_fn)

    def stream(pipe, count=1000, loss_fn=F.mse_loss):
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.01)
        return pipe.train_stream(((x, x) for _ in range(count)), optimizer=optimizer, loss_fn=loss_fn)

    def slow(y, t):
        time.sleep(0.02)
        return F.mse_loss(y, t)

    def send_later(number):
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()

    def fail():
        raise ValueError("of the user")
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


def script_of(text):
    return textwrap.dedent(BEGIN) + textwrap.dedent(text)


# Ends of one process: the script, the status, and what stderr has in it; nothing, if there is no error.

LOOP = "while True: step(pipe, slow)"
ALONE = {
    "not closed": ("pipe = make(); step(pipe)", 0, ""),
    "a forward in flight": ("loss = make()(x).sum()", 0, ""),
    "sys.exit": ("pipe = make(); step(pipe); sys.exit()", 0, ""),
    "sys.exit(3) in a step": ("step(make(), lambda y, t: sys.exit(3))", 3, ""),
    "an exception": ("pipe = make(); step(pipe); fail()", 1, "ValueError: of the user"),
    "Ctrl-C": (f"pipe = make(); send_later(signal.SIGINT)\n{LOOP}", -2, "KeyboardInterrupt"),
    "SIGTERM": (f"pipe = make(); send_later(signal.SIGTERM)\n{LOOP}", -15, ""),
    "SIGTERM, to sys.exit": (
        f"signal.signal(15, lambda *which: sys.exit(7)); pipe = make(); send_later(15)\n{LOOP}",
        7,
        "",
    ),
    "an open stream": ("losses = stream(make('pipedream')); next(losses)", 0, ""),
    "Ctrl-C in a stream": (
        "losses = stream(make('pipedream'), 10**6, slow); send_later(signal.SIGINT)\nfor loss in losses: pass",
        -2,
        "KeyboardInterrupt",
    ),
    "two streams": ("a, b = stream(make('pipedream')), stream(make('pipedream_2bw')); next(a); next(b)", 0, ""),
    "a pipe in a cycle": ("pipe = make(); step(pipe); cycle = [pipe]; cycle.append(cycle); del pipe, cycle", 0, ""),
    "closed at exit": ("pipe = make(); step(pipe); atexit.register(pipe.close)", 0, ""),
}


@pytest.mark.parametrize("end", ALONE)
def test_one_process_ends_as_its_script_does(server, end):
    script, code, error = ALONE[end]
    ran = server.run(script_of(script))
    assert ran.returncode == code, ran.stderr
    assert error in ran.stderr
    assert bool(error) == bool(ran.stderr)


# Ends over two ranks: the script and, after a failure, the status of each rank.

AFTER_SUCCESS = {
    "neither closed nor destroyed": "pipe = make(); step(pipe)",
    "closed, then destroyed": "pipe = make(); step(pipe); pipe.close(); dist.destroy_process_group()",
    "destroyed, then closed": "pipe = make(); step(pipe); dist.destroy_process_group(); pipe.close()",
    "sys.exit": "pipe = make(); step(pipe); sys.exit()",
    "two pipes": "a, b = make(), make(); step(a); step(b); step(a); dist.destroy_process_group()",
    "a pipe in a cycle": "pipe = make(); step(pipe); cycle = [pipe]; cycle.append(cycle); del pipe, cycle",
    "closed at exit": "pipe = make(); step(pipe); atexit.register(pipe.close)",
    "an open stream": "losses = stream(make('pipedream')); next(losses); dist.destroy_process_group()",
    "a stream that was left": """
        for loss in stream(make("pipedream"), 6):
            break
        dist.destroy_process_group()
    """,
    "SIGTERM, which the script waits for": """
        stop = []
        signal.signal(signal.SIGTERM, lambda *which: stop.append(True))
        pipe = make()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop:
            step(pipe)
        step(pipe)
        dist.destroy_process_group()
    """,
}


@pytest.mark.parametrize("end", AFTER_SUCCESS)
def test_ranks_that_have_succeeded_end_with_status_0(server, end):
    for ran in server.run_ranks(script_of(AFTER_SUCCESS[end]), 2):
        assert (ran.returncode, ran.stderr) == (0, "")


def test_no_thread_of_a_connection_is_left_to_the_end_of_the_interpreter(server):
    """One that frees a tensor then aborts the process, which is seen here without luck, by the threads."""
    script = """
        def count():
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            return sum("gloo" in name for name in names)

        pipe = make()
        step(pipe)
        in_use = count()
        atexit._run_exitfuncs()
        print(in_use, count())
    """
    for ran in server.run_ranks(script_of(script), 2):
        in_use, after = map(int, ran.stdout.split())
        assert after < in_use, ran.stderr


AFTER_FAILURE = {
    "an exception on rank 0": ("pipe = make(); step(pipe); rank or fail(); step(pipe)", (1, 1)),
    "an exception on rank 1": ("pipe = make(); step(pipe); rank and fail(); step(pipe)", (1, 1)),
    "an exception in a step": ("pipe = make(); step(pipe, lambda y, t: fail())", (1, 1)),
    "an exception, with destroy in finally": (
        """
        pipe = make()
        try:
            rank and fail()
            step(pipe)
        finally:
            dist.destroy_process_group()
        """,
        (1, 1),
    ),
    "an exception on rank 1 in a loop over a stream": (
        """
        for loss in stream(make("pipedream"), 20):
            rank and fail()
        """,
        (0, 1),  # rank 1 has left its loop; its part of the stream goes on to the end
    ),
    "sys.exit(3) on both": ("pipe = make(); step(pipe); sys.exit(3)", (3, 3)),
    "sys.exit(3) in a step": ("pipe = make(); step(pipe, lambda y, t: sys.exit(3))", (1, 3)),
    "Ctrl-C in a stream": (
        "losses = stream(make('pipedream'), 10**6, slow); send_later(signal.SIGINT)\nfor loss in losses: pass",
        (-2, -2),
    ),
    "SIGTERM": ("pipe = make(); send_later(signal.SIGTERM)\nwhile True: step(pipe, slow)", (-15, -15)),
}


@pytest.mark.parametrize("end", AFTER_FAILURE)
def test_ranks_that_have_failed_end_with_the_error_of_the_user(server, end):
    script, codes = AFTER_FAILURE[end]
    both = server.run_ranks(script_of(script), 2)
    assert tuple(ran.returncode for ran in both) == codes, [ran.stderr for ran in both]
    errors = "".join(ran.stderr for ran in both)
    assert "terminate" not in errors
    assert "ignored" not in errors
    assert ("ValueError: of the user" in errors) == ("fail()" in script)


def torchrun(tmp_path, text, stop=None):
    """Runs a script on two ranks of torchrun, to which a signal is sent once the first rank has made a step."""
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(script_of(text.replace("STARTED", repr(str(started)))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while stop is not None and process.poll() is None and time.monotonic() < deadline:
                if started.exists():
                    process.send_signal(stop)
                    break
                time.sleep(0.05)
            output, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_torchrun_ends_with_status_0_after_a_training_that_does_not_close_its_pipe(tmp_path):
    """Steps of which many end in a gathering make it likely that a thread of gloo is late."""
    ran = torchrun(
        tmp_path,
        """
        pipe = make()
        step(pipe)
        sys.setswitchinterval(1000)
        for _ in range(20):
            pipe.gather_last_step()
        dist.destroy_process_group()
        """,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_torchrun_shows_the_error_of_the_user(tmp_path):
    ran = torchrun(tmp_path, "pipe = make(); step(pipe); rank and fail(); step(pipe)")
    assert ran.returncode == 1
    assert "ValueError: of the user" in ran.stderr
    assert "SIGABRT" not in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_torchrun_that_is_stopped_ends_its_ranks(tmp_path, number):
    ran = torchrun(
        tmp_path,
        """
        pipe = make()
        step(pipe)
        open(STARTED, "w").close()
        while True:
            step(pipe, slow)
        """,
        number,
    )
    assert ran.returncode != 0
    assert "terminate called" not in ran.stderr
    assert "SIGABRT" not in ran.stderr
