"""A process that answers lines, so that one that crashes or hangs is told of, and another process takes the next.

Answers are lines of JSON behind a mark, since libraries print what they like.
"""

import contextlib
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
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
MARK = "@answer "
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class NoAnswerError(Exception):
    """The process has ended, or has taken too long."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind  # "crashes" or "hangs"


class AnsweringProcess:
    """Runs a module that calls `serve`, in another process after each that was lost and after many questions."""

    def __init__(self, *modules: str, limit: float, questions: int = 300):
        """`limit`: seconds that an answer may take; `questions`: for one process."""
        self.modules, self.limit, self.questions = modules, limit, questions
        self.process: subprocess.Popen[str] | None = None

    def ask(self, question: str) -> Any:
        if self.process is None or self.left == 0:
            self._start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        self.left -= 1
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            while (line := self.lines.get(timeout=self.limit)) is not None:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        except queue.Empty:
            detail = f"no answer after {self.limit:.0f} s{self._where(process)}"
            self.close()
            raise NoAnswerError("hangs", detail) from None
        except BrokenPipeError:
            pass
        status = process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or [""])[-1]
        self.close()
        raise NoAnswerError("crashes", f"exit status {status}: {last}")

    def _where(self, process: subprocess.Popen[str]) -> str:
        """What the process is at, as it says itself when it is asked."""
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        self.errors.seek(0)
        frames = [line.strip() for line in self.errors.read().splitlines() if line.startswith("  File ")]
        return "".join(f"; {frame}" for frame in frames[:12])

    def _start(self) -> None:
        self.close()
        self.left = self.questions
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.modules],
            env=os.environ | ENVIRONMENT,
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


def serve(answer: Callable[[str], Any]) -> None:
    """Answers the lines that come, in the process."""
    import torch

    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        print("\n" + MARK + json.dumps(answer(line.rstrip("\n"))), flush=True)
