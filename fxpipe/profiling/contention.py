"""Measures how much workers on CPUs slow each other down: they share memory, caches and, as hyperthreads, cores.

A fixed piece of training, a layer forward and backward, runs in one thread, and then in a thread for each worker:

    alone      |step step step|
    together   |step === step === step ===|       seconds together / seconds alone = the contention
               |step === step === step ===|

Both alternate, so other load disturbs both; if each worker has one thread, processor time is measured. The factor
belongs to the machine, so it is measured once in a process. `Profile.contention` is this factor; 1.0 if micro-batches
are so short that Python dominates.
"""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
import torch.nn.functional as F

LEAST_SECONDS = 0.01  # seconds of a micro-batch, forward and backward; below, Python dominates
ROWS, WIDTH = 32, 1024  # a layer whose weights and gradients exceed the cache of a core
ROUNDS, STEPS = 3, 3


@functools.cache
def cpu_contention(workers: int, threads: int) -> float:
    """Measures the seconds of workers that run together relative to one alone, each with this number of threads."""
    if workers == 1:
        return 1.0
    clock = time.thread_time if threads == 1 else time.perf_counter
    rows, weights = (torch.ones(workers, height, WIDTH, dtype=torch.float32, device="cpu") for height in (ROWS, WIDTH))
    operands = [(x, weight.detach().requires_grad_()) for x, weight in zip(rows, weights, strict=True)]

    def steps(place: int, barrier: threading.Barrier) -> list[float]:
        (x, weight), seconds = operands[place], []
        barrier.wait()
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(STEPS + 1):
                start = clock()
                torch.autograd.grad(F.gelu(F.linear(x, weight)).sum(), weight)
                seconds.append(clock() - start)
        return seconds[1:]  # the first is a warm-up

    samples: dict[int, list[float]] = {1: [], workers: []}  # by the number of threads that run at the same time
    with ThreadPoolExecutor(workers, "fxpipe contention") as pool:
        for _ in range(ROUNDS):
            for count, seconds in samples.items():
                barrier = threading.Barrier(count)
                for of_one in pool.map(steps, range(count), [barrier] * count):
                    seconds += of_one
    return max(1.0, median(samples[workers]) / median(samples[1]))
