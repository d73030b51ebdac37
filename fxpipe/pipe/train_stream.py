"""`pipe.train_stream`: an iterator over the losses of mini-batches that run through the stages without a flush."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from fxpipe.errors import ArgumentError, StateError
from fxpipe.pipe.model_calls import ModelCall, parse_call, refuse_written, tensor_versions
from fxpipe.pipe.pipeline_state import PipelineState
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.executors import close_all_executors
from fxpipe.runtime.losses import LossCall, check_loss_function, model_loss
from fxpipe.runtime.stage_updates import StagewiseOptimizer
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.stream import Stream
from fxpipe.scheduling.streams import STREAM_POLICIES, StreamSchedule, WeightPolicy
from fxpipe.utils.accelerator import draw_seed, mix_seed, peek_seed

READ_AHEAD = 2  # additional mini-batches, so that the first stage need not wait for the reader of losses

S = TypeVar("S", bound=Stream)

_streams: weakref.WeakSet[TrainStream] = weakref.WeakSet()


class TrainStream(Iterator[torch.Tensor]):
    """The losses of a stream, one for each mini-batch, in order. Created by `pipe.train_stream`.

    A context manager, which closes it. It also closes when the last reference is dropped, for example after a `break`:
    the running stream refers to the loop only.
    """

    def __init__(self, loop: StreamLoop):
        self._loop, self._losses = loop, _losses_of(loop, weakref.ref(self))
        _streams.add(self)

    @property
    def applied(self) -> tuple[int, ...]:
        """The number of mini-batches, in order from the first, that are in each stage's weights.

        After the stream has ended or was closed, it is the same for all stages.
        """
        stream = self._loop.stream
        return () if stream is None else tuple(stream.applied)

    @property
    def versions_held(self) -> tuple[int, ...]:
        """The largest number of versions of its weights that each stage has held so far."""
        stream = self._loop.stream
        return () if stream is None else stream.versions_held

    def __next__(self) -> torch.Tensor:
        return next(self._losses)

    def close(self) -> None:
        """Ends the stream: all mini-batches that were read run through all stages and are applied.

        If the pipe is closed already, they are dropped.

        Raises:
            Exception: an exception of a stage in one of them.
        """
        self._losses.close()

    def __enter__(self) -> TrainStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _losses_of(loop: StreamLoop, stream: weakref.ref[TrainStream]) -> Generator[torch.Tensor]:
    """Yields the losses; if the stream is not referenced any more, the pipe keeps its exception."""
    try:
        yield from loop.losses()
    except BaseException as error:
        if stream() is not None or isinstance(error, GeneratorExit):
            raise
        loop.engine.keep_failure(error)


class MiniBatches(Iterator[Any]):
    """The mini-batches of a stream, which must not change until all stages are updated with them."""

    def __init__(self, batches: Iterable[Any], count_applied: Callable[[], int]):
        self._batches, self._count_applied = iter(batches), count_applied
        self._needed: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by number, for mini-batches still needed
        self._read = 0
        self.has_written = False  # a mini-batch still needed was written to

    def __next__(self) -> Any:
        item = next(self._batches)
        applied = self._count_applied()
        self._needed = {t: versions for t, versions in self._needed.items() if t >= applied}
        try:
            for t, versions in self._needed.items():
                refuse_written(versions, f"mini-batch {t}", "train_stream")
        except ArgumentError:
            self.has_written = True
            raise
        self._needed[self._read] = tensor_versions(item)
        self._read += 1
        return item


class StreamLoop:
    """The loop of a `TrainStream`: reads mini-batches, admits them, and collects their losses."""

    def __init__(
        self,
        inside: PipelineState,
        batches: Iterable[Any],
        loss: LossCall,
        optimizer: StagewiseOptimizer,
        policy: WeightPolicy,
    ):
        self._inside, self._loss, self._optimizer, self._policy = inside, loss, optimizer, policy
        self._batches = MiniBatches(batches, lambda: 0 if self.stream is None else min(self.stream.applied))
        self.engine = inside.engine
        self.stream: Stream | None = None
        self._bound: BoundProgram | None = None  # the running program
        self._has_target: bool | None = None  # mini-batches have targets
        self._seed, self._has_drawn = 0, False
        self._read = self._most = 0  # mini-batches read; the most in flight
        self._is_over = self._has_ended = False  # no mini-batch is left to admit; all are applied
        self._failure: Exception | None = None  # raised by reading the next mini-batch, which ended the stream

    def losses(self) -> Generator[torch.Tensor]:
        """Yields the losses. If closed, it ends the stream."""
        is_left = False
        with self._block() as context:
            try:
                while True:
                    with context.suspended():
                        self._fill(context)
                        loss = self.stream.collect() if self.stream is not None and self.stream.in_flight else None
                    if loss is None:
                        break
                    try:
                        if not is_left:
                            yield loss
                    except GeneratorExit:
                        if self.engine.executor.is_closed:  # at the end of the interpreter no stage can run
                            raise
                        is_left = True
                        with context.suspended():
                            self._end_reading()
                if self.stream is not None:
                    with context.suspended():
                        self.stream.close()
            except BaseException as error:
                if self.stream is not None:
                    self.stream.abort(error)
                raise
            self._has_ended = True
            if self._failure is not None and not is_left:
                raise self._failure

    def _block(self) -> AbstractContextManager[CallerContext]:
        """A block around the stream and the caller's code between its losses."""
        return self.engine.occupied(is_streaming=True)

    def _fill(self, context: CallerContext) -> None:
        """Reads and queues mini-batches until enough are in flight; after the last one, drains the stream."""
        while not self._is_over and (self.stream is None or self.stream.in_flight < self._most):
            self._admit_next(context)

    def _admit_next(self, context: CallerContext) -> None:
        """Reads and queues a mini-batch. An exception of reading does not affect earlier mini-batches."""
        try:
            given_inputs = self._given_inputs(parse_call(next(self._batches), f"mini-batch {self._read}"))
        except StopIteration:
            self._end_reading()
        except Exception as error:
            if self.stream is not None and (self.stream.run.failure is not None or self._batches.has_written):
                raise
            self._end_reading(error)
        else:
            if given_inputs.takes_all(self._loss.reduction):
                self._inside.warn_of_drop_in_memory(given_inputs, in_stream=True)
            if self.stream is None:
                self.stream = self._begin(Stream, context, self._seed)
            self.stream.admit(given_inputs)
            self._read += 1

    def _end_reading(self, failure: Exception | None = None) -> None:
        """Lets the stream end with the mini-batches that were read. `failure`: of reading the next one."""
        self._is_over = True
        if self.stream is not None:
            self.stream.drain()
        self._keep(failure)

    def _keep(self, failure: Exception | None) -> None:
        self._failure = failure
        if failure is not None and self._read:
            failure.add_note(
                f"fxpipe: raised for mini-batch {self._read} of the stream; the {self._read} before it have been "
                "applied"
            )

    def _begin(self, kind: Callable[..., S], context: CallerContext, seed: int = 0, **more: Any) -> S:
        """Begins the stream, of this kind, after planning."""
        settings, engine = self._inside.settings, self._inside.engine
        checkpoint, n = settings.checkpoint, len(settings.placement)
        modes = (checkpoint,) * n if isinstance(checkpoint, str) else checkpoint
        order = StreamSchedule(n, self._policy, modes, tuple(map(len, settings.stage_devices)), settings.chunks)
        self._most = order.mini_batches_to_end + READ_AHEAD
        parameters = self._inside.parameters_by_stage(self._optimizer)
        optimizer, devices = self._optimizer, settings.stage_devices
        return kind(engine, context, order, settings.schedule, devices, optimizer, parameters, self._loss, seed, **more)

    def _given_inputs(self, call: ModelCall) -> GivenInputs:
        """Finds the program of a mini-batch; if it differs from the running one, waits for mini-batches in flight."""
        check_can_stream_now()
        self._check_call(call)
        stream, inside = self.stream, self._inside
        seed = self._seed_of_next()
        known = inside.find_known(call, seed)
        if known is None or known.bound is not self._bound:
            if stream is not None:
                stream.drain()
                stream.wait_for_all()
            with nullcontext() if stream is None else stream.at_rest():
                known = inside.find([call], seed=seed)
            self._check_program(known.bound)
            self._bound = known.bound
        return known

    def _seed_of_next(self) -> int:
        if not self._read:
            self._seed = peek_seed()
        return mix_seed(self._seed, self._read)

    def _check_program(self, bound: BoundProgram) -> None:
        """Checks a program of the stream; the first that draws random numbers advances the generator, as a step."""
        self._inside.check_stream_program(bound, {id(p) for p in self._optimizer.parameters()})
        if bound.program.is_random and not self._has_drawn:
            self._has_drawn = True
            draw_seed()

    def _check_call(self, call: ModelCall) -> None:
        has_target = bool(call.target)
        if self._has_target is None:
            self._has_target = has_target
            function = self._loss.function
            check_loss_function(None if function is model_loss else function, call.target or None)
        if has_target is not self._has_target:
            with_one, without = ("it", "those before it") if has_target else ("those before it", "it")
            raise ArgumentError(
                f"of the mini-batches {with_one} has a target and {without} none: give all one, or none"
            )


def check_can_stream_now() -> None:
    if not torch.is_grad_enabled():
        raise StateError(
            "train_stream needs gradients, but its next loss is asked for under no_grad; evaluate when the stream has "
            "ended, or is closed"
        )


def stream_policy(schedule: Any, vertical_sync: bool) -> WeightPolicy:
    """Returns the policy for the versions of weights; raises if the schedule is not for streams."""
    policy = STREAM_POLICIES.get(schedule) if isinstance(schedule, str) else None
    if policy is None:
        names = " or ".join(f"schedule={name!r}" for name in STREAM_POLICIES)
        raise ArgumentError(
            f"train_stream needs a pipe with {names}, whose stages do not wait for the end of a step; this one has "
            f"schedule={getattr(schedule, 'name', schedule)!r}, which forward_backward runs"
        )
    if not vertical_sync:
        return policy
    if policy is WeightPolicy.DOUBLE_BUFFERING:
        raise ArgumentError(
            f"vertical_sync=True with schedule={schedule!r}, in which all stages have the same version of the weights "
            "anyway: leave it out"
        )
    return WeightPolicy.VERTICAL_SYNC


@atexit.register
def _drop_streams() -> None:
    """Drops the open streams before the interpreter clears modules."""
    close_all_executors()
    for stream in list(_streams):
        with contextlib.suppress(Exception):  # no caller is left to see it
            stream.close()
