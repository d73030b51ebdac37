"""Judges cases in a process of its own, so that one that crashes or hangs is a verdict, and the next go on.

`python -m random_models.worker` reads a case, as a line of JSON, and answers with a line of JSON behind a mark.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import IO

from random_models.case import Case

TESTS = Path(__file__).resolve().parents[1]
MARK = "@verdict "
CASES = 300  # that a process judges before a fresh one takes over


class Worker:
    """A process that judges one case at a time; another one where it ends or takes too long."""

    def __init__(self, limit: float):
        self.limit = limit
        self.process: subprocess.Popen[str] | None = None

    def judge(self, case: Case) -> dict[str, object]:
        """The fields of a verdict."""
        if self.process is None or self.left == 0:
            self._start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        self.left -= 1
        try:
            process.stdin.write(case.to_json() + "\n")
            process.stdin.flush()
            while (line := self.lines.get(timeout=self.limit)) is not None:
                if line.startswith(MARK):
                    verdict: dict[str, object] = json.loads(line.removeprefix(MARK))
                    return verdict
        except queue.Empty:
            detail = f"no verdict after {self.limit:.0f} s{self._where(process)}"
            self.close()
            return {"kind": "hangs", "detail": detail, "refused_steps": []}
        except BrokenPipeError:
            pass
        status = process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or [""])[-1]
        self.close()
        return {"kind": "crashes", "detail": f"exit status {status}: {last}", "refused_steps": []}

    def _where(self, process: subprocess.Popen[str]) -> str:
        """What the process is at, as it says itself when it is asked."""
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        self.errors.seek(0)
        frames = [line.strip() for line in self.errors.read().splitlines() if line.startswith("  File ")]
        return "".join(f"; {frame}" for frame in frames[:12])

    def _start(self) -> None:
        self.close()
        self.left = CASES
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.lines: queue.Queue[str | None] = queue.Queue()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "random_models.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        assert self.process.stdout is not None
        threading.Thread(target=_read, args=(self.process.stdout, self.lines), daemon=True).start()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.errors.close()
            self.process = None


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def main() -> None:
    import torch

    from random_models.judge import judge

    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        verdict = judge(Case.from_json(line))
        print("\n" + MARK + json.dumps(dataclasses.asdict(verdict)), flush=True)


if __name__ == "__main__":
    main()
