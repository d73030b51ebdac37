"""Processes that torchrun starts, and starts again: training goes on; what was started wrongly is a clear error."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from helpers.paths import ROOT
from helpers.restartable_training import STEPS, make_pipe, train_step

SECONDS = 300.0
# With the store of the processes that are gone, those that are started again may meet at their addresses (torch 2.13).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(*arguments):
    """Runs torchrun with two processes; neither outlives it, also where it does not end."""
    environment = {**os.environ, **FRESH_STORE, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_a_rank_that_is_killed_is_started_again_and_the_losses_are_those_of_an_undisturbed_run(tmp_path):
    script = ROOT / "tests" / "helpers" / "restartable_training.py"
    done = torchrun("--standalone", "--max-restarts", 1, script, tmp_path, 3)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    with make_pipe(["cpu"] * 2)[0] as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
        losses = [train_step(pipe, optimizer, step) for step in range(STEPS)]
    for rank in range(2):
        lines = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert [int(step) for step, _ in lines] == [0, 1, 2, *range(2, STEPS)]  # step 3 was not finished by any
        assert [float(loss) for _, loss in lines] == pytest.approx(losses[:3] + losses[2:])


def test_a_port_that_is_in_use_is_an_error_that_names_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = torchrun("--master-addr", "127.0.0.1", "--master-port", port, "no_script.py")
    assert done.returncode != 0
    assert "address already in use" in done.stderr
    assert str(port) in done.stderr
