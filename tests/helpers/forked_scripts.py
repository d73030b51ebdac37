"""Scripts in processes of their own that need not import torch and fxpipe again: each is forked from one that has.

    with ForkServer() as server:
        ran = server.run("import fxpipe; sys.exit(3)")
        assert (ran.returncode, ran.stderr) == (3, "")

A script is what runs as `__main__`, and its process ends as any other, by the end of the interpreter. Nothing but
imports, and a plan, was done before: no pipe and no thread has been there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 60.0  # that a script may take


class ForkServer:
    """The process that scripts are forked from."""

    def __enter__(self) -> ForkServer:
        self._folder = tempfile.TemporaryDirectory()
        self._server = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with self._server as server:
            assert server.stdin is not None
            server.stdin.close()
        self._folder.cleanup()

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a script to its end; one that takes too long is killed."""
        files = {name: str(Path(self._folder.name, name)) for name in ("script", "stdout", "stderr")}
        Path(files["script"]).write_text(script)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(files), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        output, errors = (Path(files[name]).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(["forked"], code, output, errors)


def _serve() -> dict[str, str] | None:
    """Forks a process for each request; returns the request in it, and None in the server, at the end."""
    for line in sys.stdin:
        request: dict[str, str] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        watch = subprocess.Popen(["sh", "-c", f"sleep {SECONDS:g}; kill -9 {child}"], stdin=subprocess.DEVNULL)
        _, status = os.waitpid(child, 0)
        watch.kill()
        watch.wait()
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: dict[str, str]) -> dict[str, Any]:
    """Takes the files of a request for output; returns the names of a new `__main__`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return {"__name__": "__main__", "__builtins__": __builtins__}


def _import_all() -> None:
    import torch

    import fxpipe

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fxpipe.plan(model, 2, chunks=2, example_args=(torch.ones(4, 2),), hardware="cpu", progress=False)


if __name__ == "__main__":
    _import_all()
    wanted = _serve()
    if wanted is not None:
        names = _become(wanted)
        exec(compile(Path(wanted["script"]).read_text(), wanted["script"], "exec"), names)
