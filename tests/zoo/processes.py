"""Rows of a model from processes of their own: where one crashes or hangs, that is a row, and the next go on."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from zoo.entry import Entry
from zoo.row import Row, Task
from zoo.trial import MARK

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def rows_of(entry: Entry, tasks: Sequence[Task], limit: float, *, notes_calls: bool = False) -> list[Row]:
    """A row for each task. `limit`: seconds that one may take. `notes_calls`: say which functions of fxpipe ran."""
    rows: list[Row] = []
    while len(rows) < len(tasks):
        done, verdict, message = _process(entry, tasks[len(rows) :], limit, notes_calls)
        rows += done
        if verdict:
            way, mode, stages = tasks[len(rows)]
            rows.append(Row(entry.name, entry.family, way, mode, stages, verdict, message))
    return rows


def _process(entry: Entry, tasks: Sequence[Task], limit: float, notes_calls: bool) -> tuple[list[Row], str, str]:
    """Rows of one process, and how it ended before its time: a verdict (empty if it did not) and a message."""
    modules = ["helpers.called_functions", "zoo.trial"] if notes_calls else ["zoo.trial"]
    command = [sys.executable, "-m", *modules, entry.name, *(" ".join(map(str, task)) for task in tasks)]
    lines: queue.Queue[str | None] = queue.Queue()
    rows: list[Row] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        reader = threading.Thread(target=_read, args=(process, lines))
        reader.start()
        try:
            while len(rows) < len(tasks):
                line = lines.get(timeout=limit)
                if line is None:
                    break
                if line.startswith(MARK):
                    rows.append(Row(**json.loads(line.removeprefix(MARK))))
        except queue.Empty:
            return rows, "hangs", f"no result after {limit:.0f} s"
        finally:
            process.kill()
            status = process.wait()
            reader.join()
        if len(rows) == len(tasks):
            return rows, "", ""
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
        return rows, "crashes", f"exit status {status}: {last}"


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)
