"""Scripts in processes of their own that need not import torch and fxpipe again: each is forked from one that has.

    with ForkServer() as server:
        ran = server.run("import fxpipe; sys.exit(3)")
        assert (ran.returncode, ran.stderr) == (3, "")
        first, second = server.run_ranks(script, 2)

A script is what runs as `__main__`, and its process ends as any other, by the end of the interpreter. Nothing but
imports, and a plan, was done before: no pipe and no thread has been there.
"""

from __future__ import annotations

import gc
import json
import os
import socket
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
        return self._run([{}], script)[0]

    def run_ranks(self, script: str, size: int) -> list[subprocess.CompletedProcess[str]]:
        """Runs a script in several processes side by side, with the environment that torchrun gives its ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        same = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return self._run([{"RANK": str(rank), **same} for rank in range(size)], script)

    def _run(self, environments: list[dict[str, str]], script: str) -> list[subprocess.CompletedProcess[str]]:
        requests = []
        for number, environment in enumerate(environments):
            files = {name: str(Path(self._folder.name, f"{name}{number}")) for name in ("script", "stdout", "stderr")}
            Path(files["script"]).write_text(script)
            requests.append(files | {"environment": environment})
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(requests), file=self._server.stdin, flush=True)
        codes = json.loads(self._server.stdout.readline())
        return [
            subprocess.CompletedProcess(
                ["forked"], code, *(Path(request[name]).read_text() for name in ("stdout", "stderr"))
            )
            for code, request in zip(codes, requests, strict=True)
        ]


def _serve() -> dict[str, Any] | None:
    """Forks the processes of each request; returns the request in one of them, and None in the server, at the end."""
    for line in sys.stdin:
        children = []
        for request in json.loads(line):
            child = os.fork()
            if child == 0:
                return dict(request)
            children.append(child)
        names = " ".join(map(str, children))
        watch = subprocess.Popen(["sh", "-c", f"sleep {SECONDS:g}; kill -9 {names}"], stdin=subprocess.DEVNULL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        watch.kill()
        watch.wait()
        print(json.dumps(codes), flush=True)
    return None


def _become(request: dict[str, Any]) -> dict[str, Any]:
    """Takes the files of a request for output; returns the names of a new `__main__`."""
    os.environ.update(request["environment"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return {"__name__": "__main__", "__builtins__": __builtins__}


def _import_all() -> None:
    import torch
    import torch._dynamo
    import torch.distributed.tensor

    import fxpipe
    import fxpipe.distributed

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fxpipe.plan(model, 2, chunks=2, example_args=(torch.ones(4, 2),), hardware="cpu", progress=False)
    gc.collect()
    gc.freeze()  # the ends of forks need not look at what was imported


if __name__ == "__main__":
    _import_all()
    wanted = _serve()
    if wanted is not None:
        names = _become(wanted)
        exec(compile(Path(wanted["script"]).read_text(), wanted["script"], "exec"), names)
