"""GPUs that are none: tensors lie in the CPU's memory, and streams only remember what they have been told to wait for.

A stream's clock says how far it comes after every other one: `clock[s] >= t` means that whatever runs on it now runs
after the t-th thing that s was given. The host has such a clock too; it learns by waiting for events or asking them.
So every copy and every use of what was copied can be checked, whatever order the host has called things in: does the
one who reads come after the one who wrote, and is memory given back only when nobody is at it?
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")


class Clock(dict):
    def join(self, other):
        for stream, tick in other.items():
            self[stream] = max(tick, self.get(stream, 0))

    def is_behind(self, mark):
        stream, tick = mark
        return self.get(stream, 0) >= tick


class Stream:
    def __init__(self, machine, device, name):
        self.machine, self.device, self.name, self.clock = machine, device, name, Clock()

    def __repr__(self):
        return self.name

    def tick(self):
        """Is given something to do; returns its mark."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def wait_event(self, event):
        self.machine.look_at_freed()
        self.machine.counts["waits"] += 1
        self.clock.join(event.clock)


class Event:
    def __init__(self, machine, stream):
        self.machine, self.clock = machine, Clock(stream.clock)

    def synchronize(self):
        self.machine.counts["host waits"] += 1
        self.machine.host.join(self.clock)

    def query(self):
        """Some have passed, some have not: who asks must cope with both."""
        passed = self.machine.random.random() < 0.5
        if passed:
            self.machine.host.join(self.clock)
        return passed


@dataclass
class Memory:
    """A storage that the machine knows."""

    ref: StorageWeakRef
    device: torch.device
    written: tuple[str, int] | None  # by which stream, as its how-many-eth; None by the host
    pool: Stream | None  # whose memory it is: the next to be given it runs on this stream
    is_pinned: bool = False
    read: list[tuple[str, int]] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


class FakeMachine:
    """Fulfils `fxpipe.runtime.transport.DeviceBackend`, and raises AssertionError where an order is missing."""

    def __init__(self, seed):
        self.random, self.host = random.Random(seed), Clock()
        self.streams, self.currents, self.here = {}, {}, CPU
        self.memories = {}
        self.counts = {"copies": 0, "waits": 0, "host waits": 0, "freed": 0}

    def _named(self, device, name):
        return self.streams.setdefault(name, Stream(self, device, name))

    # -- what transport asks for -------------------------------------------------------------------------------------

    def current(self, device):
        return self.currents.setdefault(device, self._named(device, f"caller's on {device}"))

    def copy_streams(self, source, target):
        ends = dict.fromkeys(device for device in (source, target) if device.type == "cuda")
        return tuple(self._named(device, f"copy {source} to {target} on {device}") for device in ends)

    @contextlib.contextmanager
    def on(self, *streams):
        before = dict(self.currents), self.here
        for stream in streams:
            self.currents[stream.device], self.here = stream, stream.device
        if len(streams) > 1 and not streams[-1].name.startswith("copy"):
            self.here = CPU  # at no stage's work
        try:
            yield
        finally:
            self.currents, self.here = before

    def record(self, stream):
        self.look_at_freed()
        return Event(self, stream)

    def wait_on_host(self, event):
        event.synchronize()

    def device_of(self, tensor):
        return self._memory(tensor).device

    def copy(self, memory, target):
        self.look_at_freed()
        self.counts["copies"] += 1
        read = self._memory(memory)
        source = self.current(read.device) if read.device.type == "cuda" else None
        sink = self.current(target) if target.type == "cuda" else None
        runs = source or sink  # as torch has it, which has the two wait for each other
        if source and sink:
            runs.clock.join(sink.clock)
        assert runs is not None, "a copy from CPU to CPU needs no stream"
        assert runs.name.startswith("copy"), f"a copy runs on {runs}, where it stops what is computed"
        assert read.device.type != "cpu" or read.is_pinned, "a copy from memory that is not pinned"
        assert read.written is None or runs.clock.is_behind(read.written), f"{runs} reads before {read.written} wrote"
        mark = runs.tick()
        read.read.append(mark)
        if source and sink:
            sink.clock.join(runs.clock)
        made = memory.clone()
        self._enter(made, target, mark, sink, is_pinned=sink is None)
        return made

    def pinned(self, memory):
        if self._memory(memory).is_pinned:
            return memory
        made = memory.clone()
        self._enter(made, CPU, None, None, is_pinned=True)
        return made

    def keep(self, tensor, stream):
        self._memory(tensor).kept.add(stream.name)

    def place(self, tensor, device):
        """Says where a tensor is that comes from outside: written by all that the current stream has been given."""
        stream = self.current(device) if device.type == "cuda" else None
        self._enter(tensor, device, stream and stream.tick(), stream)

    # -- what it knows -----------------------------------------------------------------------------------------------

    def _enter(self, tensor, device, written, pool, is_pinned=False):
        ref = StorageWeakRef(tensor.untyped_storage())
        self.memories[ref.cdata] = found = Memory(ref, device, written, pool, is_pinned)
        return found

    def _memory(self, tensor):
        """What was not copied has been made by who has it now: a stage on its compute stream, or the host."""
        found = self.memories.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        if found is not None:
            return found
        stream = self.current(self.here) if self.here.type == "cuda" else None
        return self._enter(tensor, self.here, stream and stream.tick(), stream)

    def use(self, tensor):
        """Whoever runs now reads it."""
        memory = self._memory(tensor)
        clock = self.host if memory.device.type == "cpu" else self.current(memory.device).clock
        who = "the host" if memory.device.type == "cpu" else self.current(memory.device)
        assert self.here == memory.device or self.here == CPU, f"{self.here} uses what is on {memory.device}"
        assert memory.written is None or clock.is_behind(memory.written), f"{who} reads before {memory.written} wrote"
        if memory.device.type == "cuda":
            memory.read.append(self.current(memory.device).tick())

    def look_at_freed(self):
        for key, memory in list(self.memories.items()):
            if not memory.ref.expired():
                continue
            self.counts["freed"] += 1
            del self.memories[key]
            if memory.is_pinned:
                continue  # torch's own allocator minds the copies that it knows of
            for mark in memory.read:
                behind = memory.pool is None or memory.pool.clock.is_behind(mark)
                safe = behind or self.host.is_behind(mark) or mark[0] in memory.kept
                assert safe, f"memory of {memory.pool} is given back before {mark} has read it"
