"""Hosts of their own, joined by a network: the same training, and an error that names the host that is cut off."""

import os
import sys
import time

import pytest
import torch
from helpers import hosts
from helpers.hosts import Hosts
from helpers.paths import ROOT
from helpers.restartable_training import STEPS, make_pipe, train_step

SECONDS = 120.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
pytestmark = pytest.mark.skipif(hosts.why_none() != "", reason=hosts.why_none())


def rank_on(network, host, script, *arguments):
    """Starts what torchrun would start there."""
    command = [sys.executable, str(ROOT / "tests" / "helpers" / script), *map(str, arguments)]
    rank = {"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    server = {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29400"}
    return network.start(host, command, ENVIRONMENT | rank | server)


@pytest.mark.slow
def test_two_hosts_train_as_one_process(tmp_path):
    with Hosts(2) as network:
        for process in [rank_on(network, host, "restartable_training.py", tmp_path, STEPS) for host in range(2)]:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
    with make_pipe(["cpu"] * 2)[0] as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
        losses = [train_step(pipe, optimizer, step) for step in range(STEPS)]
    for rank in range(2):
        lines = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert [float(loss) for _, loss in lines] == pytest.approx(losses)


def test_a_host_that_is_cut_off_is_an_error_on_both_sides_after_the_timeout(tmp_path):
    with Hosts(2) as network:
        processes = [rank_on(network, host, "cut_off_training.py", tmp_path) for host in range(2)]
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "in-a-step").exists():
            assert all(process.poll() is None for process in processes), processes[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        network.cut_off(1)
        (tmp_path / "cut-off").touch()
        files = [tmp_path / f"{name}-{rank}" for name in ("error", "again") for rank in range(2)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    for file, told in zip(
        files, ("rank 1 does not answer", "host cannot be reached", "rank 1 of 2 has not come", "host"), strict=True
    ):
        seconds, text = file.read_text().split("\n", 1)
        assert text.startswith("DistributedError")
        assert told in text
        assert float(seconds) < 40
