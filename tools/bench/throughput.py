"""Forward and backward of a mini-batch on the cores of one machine: plain torch, other pipelines, fxpipe, in one run.

    python tools/bench/throughput.py
    python tools/bench/throughput.py --models gpt --rounds 5 --json throughput.json

What is compared, how, and what came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from distributed_rival import DistributedPipe
from models import WORKLOADS, Workload
from tables import Table
from tabulate import tabulate
from timing import Contestant, Summary, ratios, run_rounds, summarise, use_one_thread, use_threads
from torch import Tensor, nn

import fxpipe

STAGES = 2
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
RIVALS = ("torchgpipe", "distributed")
REFERENCE = "plain, 1 thread, micro-batches"
ONE_LOOP, TWO_LOOPS = "one loop", "two loops at once"  # of the capacity


# ---- contestants ----


def clear_gradients(model: nn.Module) -> Callable[[], None]:
    return lambda: model.zero_grad(set_to_none=True)


def run_micro_batches(model: nn.Module, workload: Workload, indices: range, chunks: int) -> float:
    """Forward and backward of some of the micro-batches, one after the other; returns their part of the loss."""
    inputs, targets = workload.input.tensor_split(chunks), workload.target.tensor_split(chunks)
    total = torch.zeros(())
    for i in indices:
        weight = len(inputs[i]) / len(workload.input)
        loss = workload.loss_fn(model(inputs[i]), targets[i]) * weight
        loss.backward()
        total += loss.detach()
    return total.item()


def run_module(module: nn.Module, workload: Workload) -> float:
    """Forward and backward of the whole mini-batch: a plain model, or anything that is called like one."""
    loss = workload.loss_fn(module(workload.input), workload.target)
    loss.backward()
    return loss.item()


def plain_contestants(workload: Workload, chunks: int) -> dict[str, Contestant]:
    model = copy.deepcopy(workload.model)
    prepare = clear_gradients(model)
    cores = torch.get_num_threads()

    def run_in_micro_batches() -> float:
        return run_micro_batches(model, workload, range(chunks), chunks)

    return {
        REFERENCE: Contestant(run_in_micro_batches, 1, prepare),
        "plain, 1 thread": Contestant(lambda: run_module(model, workload), 1, prepare),
        f"plain, {cores} threads": Contestant(lambda: run_module(model, workload), cores, prepare),
        f"plain, {cores} threads, micro-batches": Contestant(run_in_micro_batches, cores, prepare),
    }


@contextmanager
def worker_per_stage() -> Iterator[None]:
    """Lets torchgpipe have a worker for each stage; it has one for each device, so only one on CPU."""
    import torchgpipe.pipeline
    from torchgpipe.worker import worker

    @contextmanager
    def spawn_workers(devices: list[torch.device]) -> Iterator[tuple[list[Any], list[Any]]]:
        queues = [(Queue(), Queue()) for _ in devices]  # type: ignore[var-annotated]
        threads = [
            Thread(target=worker, args=(tasks, results, device, torch.is_grad_enabled()), daemon=True)
            for (tasks, results), device in zip(queues, devices, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield [tasks for tasks, _ in queues], [results for _, results in queues]
        finally:
            for tasks, _ in queues:
                tasks.put(None)
            for thread in threads:
                thread.join()

    original = torchgpipe.pipeline.spawn_workers
    torchgpipe.pipeline.spawn_workers = spawn_workers
    try:
        yield
    finally:
        torchgpipe.pipeline.spawn_workers = original


def torchgpipe_contestants(workload: Workload, chunks: int) -> dict[str, Contestant]:
    """torchgpipe as it is, with one and with all threads, and with a worker for each stage; without recomputation."""
    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    model = workload.as_sequential(copy.deepcopy(workload.model))
    sample = workload.input.tensor_split(chunks)[0]
    with use_threads(1):
        balance = balance_by_time(STAGES, model, sample, device="cpu")
    pipe = GPipe(model, balance, devices=["cpu"] * STAGES, chunks=chunks, checkpoint="never")
    print(f"torchgpipe's balance of the {len(model)} layers of {workload.name}: {balance}")
    prepare = clear_gradients(pipe)
    cores = torch.get_num_threads()

    def run() -> float:
        return run_module(pipe, workload)

    def run_with_workers() -> float:
        with worker_per_stage():
            return run_module(pipe, workload)

    return {
        "torchgpipe, 1 thread": Contestant(run, 1, prepare),
        f"torchgpipe, {cores} threads": Contestant(run, cores, prepare),
        f"torchgpipe, {STAGES} workers": Contestant(run_with_workers, max(1, cores // STAGES), prepare),
    }


def distributed_contestants(workload: Workload, chunks: int, stack: ExitStack) -> dict[str, Contestant]:
    """`torch.distributed.pipelining`, a process for each stage; to tell them to run takes under 1 ms."""
    pipe = stack.enter_context(DistributedPipe(workload, "1f1b", chunks))
    print(f"torch.distributed.pipelining is cut in front of {pipe.split}")
    return {"distributed, 1f1b": Contestant(pipe.step, torch.get_num_threads(), pipe.clear_gradients)}


def fxpipe_contestants(workload: Workload, chunks: int, stack: ExitStack) -> dict[str, Contestant]:
    """Both schedules of `forward_backward`, and the drop-in; the caller keeps all threads, as a user would."""
    contestants = {}
    threads = torch.get_num_threads()
    for schedule in SCHEDULES:
        model = copy.deepcopy(workload.model)
        pipe = stack.enter_context(
            fxpipe.pipeline(
                model,
                devices=["cpu"] * STAGES,
                chunks=chunks,
                example_args=(workload.input,),
                schedule=schedule,
                checkpoint="never",
            )
        )
        prepare = clear_gradients(model)

        def run(pipe: Any = pipe) -> float:
            loss: Tensor = pipe.forward_backward(workload.input, target=workload.target, loss_fn=workload.loss_fn)
            return loss.item()

        contestants[f"fxpipe, {schedule}"] = Contestant(run, threads, prepare)
    print(f"\nfxpipe's plan of {workload.name}:\n{pipe.plan}\n")
    contestants["fxpipe, drop-in"] = Contestant(lambda: run_module(pipe, workload), threads, prepare)
    return contestants


def capacity_contestants(workload: Workload, chunks: int, stack: ExitStack) -> dict[str, Contestant]:
    """Half of the micro-batches through the model in a thread of its own: one such loop, and two at once.

    A loop has about the work of a stage and the same kind of operations, but waits for nobody.
    """
    models = [copy.deepcopy(workload.model) for _ in range(STAGES)]
    pool = stack.enter_context(ThreadPoolExecutor(STAGES, initializer=use_one_thread))

    def run(loops: int) -> None:
        half = range(chunks // 2)
        for future in [pool.submit(run_micro_batches, models[k], workload, half, chunks) for k in range(loops)]:
            future.result()

    def prepare() -> None:
        for model in models:
            model.zero_grad(set_to_none=True)

    return {
        ONE_LOOP: Contestant(lambda: run(1), torch.get_num_threads(), prepare),
        TWO_LOOPS: Contestant(lambda: run(2), torch.get_num_threads(), prepare),
    }


def check_losses(contestants: dict[str, Contestant]) -> None:
    """All contestants compute the same loss; otherwise their times mean nothing."""
    losses = {}
    for name, contestant in contestants.items():
        with use_threads(contestant.threads):
            contestant.prepare()
            losses[name] = contestant.run()
    for name, loss in losses.items():
        if not abs(loss - losses[REFERENCE]) < 1e-4:  # type: ignore[operator]
            raise RuntimeError(f"{name} has loss {loss}, but {REFERENCE} has {losses[REFERENCE]}")


# ---- report ----


def find_bound(capacity: float, chunks: int) -> float:
    """The greatest speed-up of two even stages over one thread that runs the same micro-batches.

    Let a stage alone take the time 1 for a micro-batch. The first micro-batch passes the first stage, and the last one
    the second stage, while the other stage has nothing to do: time 2. In between, m − 1 times, both stages work at
    once, which takes 2/c: together 2 + 2 (m − 1)/c, against 2m for one thread.
    """
    return chunks / (1 + (chunks - 1) / capacity)


def count_faults(contestants: dict[str, Contestant], runs: int = 3) -> dict[str, float]:
    """Page faults of a step, in this process: memory that the allocator has given back and now asks for anew."""
    found = {}
    for name, contestant in contestants.items():
        counts = []
        for _ in range(runs):
            contestant.prepare()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            with use_threads(contestant.threads):
                contestant.run()
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        found[name] = statistics.median(counts)
    return found


def report(title: str, seconds: dict[str, list[float]], faults: dict[str, float], chunks: int) -> Table:
    capacity = [2 * one / two for one, two in zip(seconds[ONE_LOOP], seconds[TWO_LOOPS], strict=True)]
    bounds = [find_bound(c, chunks) for c in capacity]
    rivals = {}
    for rival in RIVALS:
        names = [name for name in seconds if name.startswith(rival)]
        if names:
            rivals[rival] = min(names, key=lambda name: summarise(seconds[name]).median)

    rows = []
    for name, values in seconds.items():
        if name in (ONE_LOOP, TWO_LOOPS):
            continue
        speed_up = ratios(seconds[REFERENCE], values)
        summary = summarise(values)
        rows.append(
            {
                "contestant": name,
                "ms, median": f"{1000 * summary.median:.0f}",
                "quartiles": f"{1000 * summary.first_quartile:.0f}–{1000 * summary.third_quartile:.0f}",
                "speed-up": str(summarise(speed_up)),
                "efficiency": format_if(is_pipeline(name), lambda s=speed_up: summarise(ratios(s, bounds))),
                "page faults": "" if name.startswith("distributed") else f"{faults[name]:,.0f}",
            }
            | {f"times {rival}": str(summarise(ratios(seconds[best], values))) for rival, best in rivals.items()}
        )
    notes = (
        f"capacity of two threads: {summarise(capacity)}; bound with {chunks} micro-batches: {summarise(bounds)}",
        f"speed-up is over '{REFERENCE}', efficiency is speed-up over bound",
        *(f"times {rival} is over its fastest: {best}" for rival, best in rivals.items()),
        "medians of the ratios within a round, with 95 % intervals",
    )
    return Table(title, tuple(rows), notes)


def is_pipeline(name: str) -> bool:
    return name.startswith(("fxpipe", *RIVALS))


def format_if(condition: bool, summary: Callable[[], Summary]) -> str:
    return str(summary()) if condition else ""


def find_environment() -> dict[str, str]:
    packages = {"torch": torch.__version__, "fxpipe": find_version("fxpipe"), "torchgpipe": find_version("torchgpipe")}
    return packages | {
        "python": platform.python_version(),
        "cpu": find_cpu_model(),
        "cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
    }


def find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def find_cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


# ---- main ----


def measure(workload: Workload, chunks: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each contestant, and of the loops that show the capacity, by round; and page faults of a step."""
    with ExitStack() as stack:
        contestants = plain_contestants(workload, chunks)
        if importlib.util.find_spec("torchgpipe"):
            contestants |= torchgpipe_contestants(workload, chunks)
        contestants |= distributed_contestants(workload, chunks, stack)
        contestants |= fxpipe_contestants(workload, chunks, stack)
        check_losses(contestants)
        contestants |= capacity_contestants(workload, chunks, stack)
        return run_rounds(contestants, rounds, name=workload.name), count_faults(contestants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,unet", help="of gpt, unet, with commas (default: both)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--chunks", default="8", help="micro-batches in a mini-batch; several with commas (default: 8)")
    parser.add_argument("--batch", type=int, default=16, help="samples in a mini-batch (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all seconds and the tables to this file")
    options = parser.parse_args()

    environment = find_environment()
    print(tabulate(environment.items()))
    result: dict[str, Any] = {"environment": environment, "batch": options.batch, "seconds": {}, "tables": []}
    for name in options.models.split(","):
        torch.manual_seed(0)
        workload = WORKLOADS[name](options.batch)
        for chunks in map(int, options.chunks.split(",")):
            seconds, faults = measure(workload, chunks, options.rounds)
            title = f"{name}: forward and backward of {options.batch} samples in {chunks} micro-batches"
            table = report(title, seconds, faults, chunks)
            print(f"\n{table}")
            result["seconds"].setdefault(name, {})[chunks] = seconds
            result["tables"].append(table.as_json())
            if options.json:
                options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
