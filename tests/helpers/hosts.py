"""Network namespaces that stand for hosts: each has addresses of its own, and a network joins them all.

    with Hosts(2) as hosts:
        process = hosts.start(1, [sys.executable, "script.py"])  # on the second host
        hosts.cut_off(1)  # its cable is pulled: packets are lost, and nobody is told

A host's files are those of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

INTERFACE = "fx0"  # of each host, on the network


@cache
def why_none() -> str:
    """Returns the reason that there are none on this machine; empty where there are."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not there"
    name = f"fxprobe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    probe = f"ip link add br{os.getpid()} type bridge && ip link del br{os.getpid()}"
    done = subprocess.run(["ip", "netns", "exec", name, "sh", "-c", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no virtual network: {done.stderr.strip()}" if done.returncode else ""


class Hosts:
    """So many hosts, whose addresses are `address(0)` and so on."""

    def __init__(self, count: int):
        self.names = [f"fxhost{os.getpid()}n{k}" for k in range(count)]
        self._switch = f"fxswitch{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for k, name in enumerate(self.names):
            cable = ("type", "veth", "peer", "name", f"port{k}", "netns", self._switch)
            _ip("-n", name, "link", "add", INTERFACE, *cable)
            _ip("-n", name, "address", "add", f"{self.address(k)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", self._switch, "link", "set", f"port{k}", "master", "bridge", "up")
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.names:  # with what torchrun has started, in sessions of their own
            for number in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
        for process in self._processes:
            process.communicate()
        for name in (self._switch, *self.names):
            _ip("netns", "del", name)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a process on a host; it ends with this block."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env={**environment, "GLOO_SOCKET_IFNAME": INTERFACE},  # gloo takes the one of the machine's name
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def cut_off(self, host: int) -> None:
        """Loses all packets from and to a host."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
