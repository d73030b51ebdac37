"""`pipe.train_stream` over processes: the loop of one rank over the losses of mini-batches.

The leader, which has the first stage, reads mini-batches, sends a job for each, and decides when the stream ends. While
mini-batches run the same graph, ranks wait for neighbours only (`rank_stream`). If another graph is needed, the
mini-batches in flight finish, and all ranks start a new *segment* with it, as they start a step.

With replicas, mini-batch t of the stream is the union over replicas, and the leaders agree on the next one: if one
replica needs another graph, all begin a segment; if one has no more mini-batches, the stream ends for all, and other
replicas drop the mini-batches they have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from fxpipe.distributed.held_tensors import RankProgram
from fxpipe.distributed.rank_engine import RankInputs
from fxpipe.distributed.rank_state import STREAM, Job, RankState
from fxpipe.distributed.rank_stream import RankStream
from fxpipe.distributed.replicas import ReplicaPart
from fxpipe.errors import ArgumentError, DistributedError
from fxpipe.pipe.model_calls import ModelCall, parse_call
from fxpipe.pipe.train_stream import StreamLoop, TrainStream, check_can_stream_now
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.utils.random_generators import draw_seed, mix_seed, peek_seed


class RankTrainStream(TrainStream):
    """The losses of a stream over processes, on each rank. `pipe.train_stream` returns it.

    All ranks iterate and get all losses. The rank of the first stage reads the inputs, the rank of the last stage the
    targets; the stream ends with the inputs. If the rank of the first stage leaves the loop, the stream ends for all
    ranks; another rank that leaves still runs its stage until then. With replicas, the first replica that ends ends the
    stream for all.

    `applied` and `versions_held` are of the stage of this rank.
    """

    def __exit__(self, *exception: object) -> None:
        """Ends the stream; passes an exception of the block to the other ranks."""
        error = exception[1]
        if not isinstance(error, BaseException):
            self.close()
            return
        try:
            self._losses.throw(error)
        except BaseException as other:
            if other is not error:
                raise


class RankStreamLoop(StreamLoop):
    """The loop that a `RankTrainStream` runs."""

    _inside: RankState
    stream: RankStream | None

    def __init__(self, inside: RankState, batches: Iterable[Any], *arguments: Any):
        super().__init__(inside, batches, *arguments)
        rank = inside.group.rank
        self._is_leader, self._is_last = rank == inside.leader, rank == inside.last
        # `batches=()` on the last rank means that there are no targets.
        self._has_batches = not (isinstance(batches, (tuple, list)) and not batches)
        self._program: RankProgram | None = None  # the program of the segment
        self._call: ModelCall | None = None  # on the leader: the last mini-batch read, if it has not run
        self._has_more = True  # on the leader: False if reading has ended

    @contextmanager
    def _block(self) -> Iterator[CallerContext]:
        """Also runs the stream on all ranks together."""
        inside, replicas = self._inside, self._inside.engine.replicas
        try:
            with super()._block() as context, inside.group.together():
                try:
                    yield context
                    inside.group.everybody(None, "the end of the stream")
                except BaseException:
                    replicas.may_differ = replicas.count > 1
                    raise
        except DistributedError as error:
            if not self._has_ended and self.stream is not None:
                self.stream.note_applied(error)
            raise

    def _fill(self, context: CallerContext) -> None:
        self._inside.check_open()
        super()._fill(context)

    def _admit_next(self, context: CallerContext) -> None:
        check_can_stream_now()
        if self._program is None:
            self._begin_segment(context)
        else:
            self._go_on(self._program)

    def _begin_segment(self, context: CallerContext) -> None:
        """Agrees with all ranks on the graph of the next mini-batch, and admits it; or ends the stream."""
        inside = self._inside
        self._read_call()
        if not inside.group.connection.broadcast(self._have_all_one(), inside.leader, "the next mini-batch"):
            self._is_over = True
            return
        with nullcontext() if self.stream is None else self.stream.at_rest():
            calls = None if self._call is None else [self._call]
            inputs = inside.agree(STREAM, calls, seed=self._seed_of_next())
        program = inputs.union
        if program.program.is_random and not self._has_drawn:
            self._has_drawn = True
            draw_seed()  # advance the generators of all ranks as in one process
        inside.check_stream_program(program, {id(p) for p in self._optimizer.parameters()})
        if self.stream is None:
            self.stream = self._begin(RankStream, context, routes=program.routes)
        self._program = program
        self._admit(inputs, self.stream.begin_segment(inputs))

    def _have_all_one(self) -> bool:
        """Returns, on the leader, whether all replicas have another mini-batch; else the stream ends for all."""
        if not self._is_leader:
            return False
        what = "the next mini-batches of the other replicas"
        return all(self._inside.group.replicas.all_gather(self._call is not None, what))

    def _go_on(self, program: RankProgram) -> None:
        """Admits the next mini-batch of the segment, or ends it."""
        assert self.stream is not None
        self._read_call()
        settled = self.stream.packets.pass_job(self._settled_job(program), self._read)
        if settled is None:
            self.stream.drain()
            self._program = None
        else:
            job, part = settled
            self._admit(self._inside.inputs_at_hand(job, self._call), part)

    def _admit(self, inputs: RankInputs, part: ReplicaPart) -> None:
        assert self.stream is not None
        inputs = self._inside.with_micro_batches(inputs, part.micro_batches // len(part.portions))
        target = self._call.target if self._call is not None else ()
        if self._is_last and not self._is_leader:
            target = self._read_target()
        if self._is_last:
            self._check_call(ModelCall((), {}, target))
        self._call = None
        self.stream.admit_part(replace(inputs, targets=target), part)
        self._read += 1

    # -- mini-batches --------------------------------------------------------------------------------------------------

    def _seed_of_next(self) -> int:
        """Returns the seed of the next mini-batch; only the leader's seed is used."""
        if not self._read:
            self._seed = peek_seed()
        return mix_seed(self._seed, self._read)

    def _read_call(self) -> None:
        """Reads a mini-batch on the leader, unless the last one read has not run."""
        if not self._is_leader or not self._has_more or self._call is not None:
            return
        try:
            self._call = parse_call(next(self._batches), f"mini-batch {self._read}")
        except StopIteration:
            self._has_more = False
        except Exception as error:
            if self._batches.has_written:
                raise
            self._end_reading(error)

    def _end_reading(self, failure: Exception | None = None) -> None:
        self._has_more = False
        if failure is not None:  # this mini-batch cannot be read, or cannot run
            self._call = None
            self._keep(failure)

    def _settled_job(self, program: RankProgram) -> tuple[Job, ReplicaPart] | None:
        """Returns the leader's message about its mini-batch; None on other ranks, or if the segment ends."""
        if not self._is_leader:
            return None
        assert self.stream is not None
        job, start = self._job(program), None
        if job is not None:
            start = self.stream.start_of(program, job.inputs)
        part = self.stream.settle_part(program, start)
        return None if job is None or part is None else (job, part)

    def _job(self, program: RankProgram) -> Job | None:
        """Returns the job of the mini-batch that the leader has read; None if it cannot run now."""
        if self._call is None:
            return None
        try:
            return self._inside.job_at_hand(program, self._call, self._seed_of_next())
        except Exception as error:
            self._end_reading(error)
            return None

    def _read_target(self) -> tuple[Any, ...]:
        """Reads the next target on the rank of the last stage. Raises `ArgumentError` if none is left."""
        if not self._has_batches:
            return ()
        try:
            item = next(self._batches)
        except StopIteration:
            raise ArgumentError(
                f"batches of rank {self._inside.group.rank}, which has the last stage, has ended after {self._read} "
                f"mini-batches, and that of rank {self._inside.leader}, of the first stage, goes on: give both the same"
            ) from None
        if type(item) in (tuple, list) and len(item) in (2, 3):  # inputs are not looked at: they may be None
            return () if item[-1] is None else (item[-1],)
        return parse_call(item, f"mini-batch {self._read}").target
