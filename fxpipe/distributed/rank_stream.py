"""`pipe.train_stream` over processes: one stage on one rank, and the loop over the losses of mini-batches.

Each rank runs its row of the schedule (`scheduling.streams`) in the thread that iterates over the losses, and waits for
its neighbours only. What all ranks need moves along the stages: down, with the values, the *job*, what the leader has
read (which graph, how many samples, or the end); up, with the last of the gradients, the *report*, the loss of the
mini-batch and the divisor of gradients, which the update of a stage needs. If another graph is needed, the mini-batches
in flight finish, and all ranks start a new *segment*, as they start a step.

With replicas, mini-batch t is the union over replicas. The leaders exchange the part of each: if one needs another
graph, all begin a segment; if one has no more mini-batches, the stream ends for all. Before U the ranks of a stage sum
its gradients. Rows are equal on all replicas.

A row runs a mini-batch when the next one is queued, so that packets arrive while the stage is busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from fxpipe.distributed.device_transfers import WAITED_FOR
from fxpipe.distributed.held_tensors import RankProgram, share_buffers
from fxpipe.distributed.packets import JOB_TAG, LossReport, PacketLink, PacketValue, tag_of
from fxpipe.distributed.rank_engine import RankEngine, RankGradients, RankInputs, open_mailbox
from fxpipe.distributed.rank_state import STREAM, RankState
from fxpipe.distributed.replicas import (
    NEXT_MINI_BATCH,
    ReplicaPart,
    StageParameter,
    drop_gradients_of_loss,
    loss_of_replica,
    parameters_of_loss,
)
from fxpipe.errors import ArgumentError, DistributedError, InternalError
from fxpipe.pipe.model_calls import ModelCall, parse_call
from fxpipe.pipe.train_stream import StreamLoop, TrainStream, check_can_stream_now
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.loss_checks import LossEvidence, LossHistory, LossVerdict, wrong_loss
from fxpipe.runtime.losses import LossCall
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.run import Run
from fxpipe.runtime.stage_updates import OverlappedUpdates
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.stream import Admitted, StageWeights, Stream, StreamEnd
from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.streams import StreamSchedule
from fxpipe.utils.pytree import map_tensor_leaves


class RankStreamEnd(StreamEnd):
    """Also reports the loss to all ranks, sums gradients over replicas, and gives all replicas the first's buffers."""

    def __init__(
        self, order: StreamSchedule, weights: Sequence[StageWeights], engine: RankEngine, loss: LossCall, stage: int
    ):
        """`stage`: of this rank."""
        super().__init__(order, weights)
        self._group, self._replicas, self._engine, self._loss = engine.group, engine.replicas, engine, loss
        self.is_last = stage == order.stages - 1
        # For the current segment; `summed` has the parameters in the reduction, the same on all replicas.
        self.summed: Mapping[StageParameter, torch.Tensor] = {}
        self.first_changes_buffers = False  # forward, on replica 0

    def after(self, run: Run, t: int, action: Action) -> None:
        super().after(run, t, action)
        one = run.mini_batches[t]
        if self.is_last and action.kind is ActionKind.BACKWARD and action.micro_batch == one.micro_batches - 1:
            one.report = self._loss_report(self.admitted[t])

    @torch.no_grad()
    def commit_buffers(self, one: MiniBatch, j: int) -> None:
        if self._group.replica == 0:
            super().commit_buffers(one, j)
        if self._group.replica_count > 1 and self.first_changes_buffers:
            ((bound, tensors),) = one.open_programs
            share_buffers(self._group, tensors, bound.program.stages[j].changes)

    def _loss_report(self, admitted: Admitted) -> LossReport:
        """Makes the report of a mini-batch. Raises `LossError` if its micro-batches do not add up to its loss."""
        one, replicas = admitted.mini_batch, self._replicas
        stage = one.loss
        assert stage is not None
        losses = stage.losses
        self._engine.refuse_strange_leaves(stage)
        if replicas.count > 1 and stage.bound.is_weighed:
            admitted.is_verified = False  # the micro-batches of all replicas add up to it, which is not verified here
        loss, divisor = super().checked_loss(admitted), losses.divisor
        if losses.takes_all and admitted.part.replica:
            drop_gradients_of_loss(one)
        if replicas.count > 1:
            own = loss_of_replica(losses), len(parameters_of_loss(one))
            reports = self._group.replicas.all_gather(own, "the losses of the other replicas")
            of_replicas = [of_replica for of_replica, _ in reports]
            reduction = "batch" if losses.takes_all else self._loss.reduction
            loss, divisor = replicas.loss_of_union(of_replicas, admitted.part, reduction)
            if any(count for _, count in reports):
                replicas.sum_of_loss(one, {})
        loss, divisor = map_tensor_leaves(lambda t: t.detach().cpu(), (loss, divisor))
        shares = [float(losses.share(i) * losses.scale) for i in range(len(losses.shares))]
        return LossReport(loss, divisor, torch.tensor(shares, dtype=torch.float64, device="cpu"), admitted.is_verified)

    def update_stage(self, mini_batches: Sequence[Admitted], j: int, updates: OverlappedUpdates) -> None:
        """Sums the gradients of a stage over replicas and updates its parameters."""
        for admitted in mini_batches if self._replicas.count > 1 else ():
            self._sum_over_replicas(admitted, j)
        super().update_stage(mini_batches, j, updates)

    def _sum_over_replicas(self, admitted: Admitted, j: int) -> None:
        """Sums the gradients of a stage over replicas. Raises `LossError` if element weights differ between them."""
        one, replicas = admitted.mini_batch, self._replicas
        own = {(name, j): gradient for name, gradient in one.totals[j].sums.items()}
        check, shares, is_verified = one.loss_weighting, one.report.shares.tolist(), one.report.is_verified
        wrong, wrong_means = (check.difference(shares.__getitem__, means_only=only) for only in (False, True))
        of_stage = LossEvidence(wrong, wrong_means, is_verified, is_verified, shares, dict(check.gradients))
        gradient_report = replicas.reduction.begin().give_rest(own)
        reports = self._group.replicas.all_gather((of_stage, gradient_report), WAITED_FOR)
        evidence, gradients = [[each] for each, _ in reports], [each for _, each in reports]
        LossVerdict(evidence, firsts=admitted.part.firsts).check(None, 0)
        total = replicas.finish_sum(own, gradients)
        if self._group.device_sums is not None:  # if a device hangs for some replicas, none goes on
            self._group.replicas.all_gather(None, WAITED_FOR)
        one.totals[j].sums = {name: gradient for (name, _), gradient in total.items()}
        if any(each.sparse for each in gradients):
            self.summed = replicas.reducible(self.summed)
            replicas.prepare_sum(self.summed)

    def checked_loss(self, admitted: Admitted) -> torch.Tensor:
        one = admitted.mini_batch
        report = one.report
        if report is None:
            raise InternalError("a mini-batch has ended without a report of its loss")
        one.exchange.check_empty()
        if not self.is_last and not report.is_verified:
            wrong = one.loss_weighting.difference(report.shares.__getitem__, means_only=True)
            if wrong is not None:
                raise wrong_loss(wrong)
        return report.loss.to(self._group.device)  # type: ignore[no-any-return]


class RankStream(Stream):
    """The mini-batches of one `train_stream` call on one rank."""

    engine: RankEngine
    end: RankStreamEnd

    def __init__(
        self, engine: RankEngine, context: CallerContext, order: StreamSchedule, *more: Any, routes: RelayRoutes
    ):
        group, placement = engine.group, routes.placement
        (self._stage,) = [j for j in range(order.stages) if routes.is_here(j, group.rank)]
        self.mailbox = open_mailbox(group, {}, routes)
        self.packets = PacketLink(group, self.mailbox, placement, (), order)
        self._waiting: tuple[Action, ...] = ()  # queued actions that have not run
        self.part = ReplicaPart(0, 0, 0)  # of the mini-batch that is admitted
        super().__init__(engine, context, order, *more, link=self.packets)
        self.stages = (self._stage,)

    def _make_end(self, order: StreamSchedule) -> StreamEnd:
        return RankStreamEnd(order, self.weights, self.engine, self.loss, self._stage)

    def pass_job(self, job: Any, t: int) -> Any:
        """Forwards the leader's job for mini-batch t, or the end of the segment; returns it on all ranks."""
        j, tag, placement = self._stage, tag_of(t, JOB_TAG), self.packets.placement
        if j:
            address = ("job", j - 1, t), tag, placement[j - 1]
            self.mailbox.expect(*address)
            ((job, _),) = self.mailbox.receive(*address, f"mini-batch {t} of the stream")
        if not self.end.is_last:
            self.mailbox.send(("job", j, t), tag, placement[j + 1], [PacketValue(job)])
        return job

    def begin_segment(self, inputs: RankInputs) -> tuple[RankInputs, ReplicaPart]:
        """Returns the first mini-batch of a graph and this replica's part in it. All ranks call it."""
        engine = self.engine
        gradients = RankGradients(engine, inputs)
        self.end.summed = gradients.parameters
        part = engine.begin(inputs, gradients, self.loss.reduction, self.end.is_last, in_stream=True)
        self.end.first_changes_buffers = part.changes_buffers
        return engine.with_head(inputs, part)

    def next_part(self, program: RankProgram, inputs: RankInputs | None) -> ReplicaPart | None:
        """Returns this replica's part in a mini-batch of the segment; None if any replica has none. For leaders."""
        own = None if inputs is None else replace(inputs, bounds=(program,), union=program)
        rest = self.loss.reduction, self.end.summed, True
        start = None if own is None else self.engine.start_of(own, *rest)
        return self.engine.replicas.begin(start, program.combinations, in_stream=True)

    def _history_of(self, given_inputs: GivenInputs) -> LossHistory:
        if self.end.is_last:
            return super()._history_of(given_inputs)
        return LossHistory(is_cheap=True, passes=1)  # looks at elements, and does not verify

    def _open(self, given_inputs: GivenInputs, history: LossHistory, is_verified: bool, **more: Any) -> MiniBatch:
        assert isinstance(given_inputs, RankInputs)
        part, engine, takes_all = self.part, self.engine, given_inputs.takes_all(self.loss.reduction)
        return MiniBatch(
            engine.own_inputs(given_inputs),
            engine.model,
            part.seed,
            losses=engine.losses_of_part(given_inputs, part, self.loss, is_verified) if self.end.is_last else None,
            look_at_elements=history.look_at_elements and part.micro_batches > 1 and not takes_all,
            first_micro_batch=part.first,
            **engine.part_of_step(given_inputs),
            **more,
        )

    def _queue(self, rows: Rows) -> None:
        """Queues rows, and runs the rows queued before."""
        self.packets.queue(rows, self.engine.group.rank)
        self._run_waiting(rows[self._stage])

    def _run_waiting(self, row: tuple[Action, ...]) -> None:
        due, self._waiting = self._waiting, row
        self.engine.executor.start(self.run, (due,))
        self._raise_failure()

    def drain(self) -> None:
        super().drain()
        self._run_waiting(())
        self.mailbox.settle()


class RankTrainStream(TrainStream):
    """The losses of a stream over processes, on each rank. `pipe.train_stream` returns it.

    See `DistributedPipeline` for what each rank reads, and who ends the stream.

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
        self._read_call()
        if self._program is None:
            self._begin_segment(context)
        else:
            self._go_on(self._program)

    def _begin_segment(self, context: CallerContext) -> None:
        """Agrees with all ranks on the graph of the next mini-batch, and admits it; or ends the stream."""
        inside, has_next = self._inside, False
        if self._is_leader:
            has_next = all(inside.group.replicas.all_gather(self._call is not None, NEXT_MINI_BATCH))
        if not inside.group.connection.broadcast(has_next, inside.leader, "the next mini-batch"):
            self._is_over = True
            return
        with nullcontext() if self.stream is None else self.stream.at_rest():
            calls = None if self._call is None else [self._call]
            inputs = inside.agree(STREAM, calls, seed=self._seed_of_next())
        program = inputs.union
        self._check_program(program)
        if self.stream is None:
            self.stream = self._begin(RankStream, context, routes=program.routes)
        self._program = program
        self._admit(*self.stream.begin_segment(inputs))

    def _go_on(self, program: RankProgram) -> None:
        """Admits the next mini-batch of the segment, or ends it."""
        stream, inside, settled, leaves = self.stream, self._inside, None, None
        assert stream is not None
        if self._is_leader:
            job, own, seed = None, None, self._seed_of_next()
            try:
                own = None if self._call is None else inside.find_known(self._call, seed)
                job = inside.job_of(STREAM, own, seed) if own is not None and own.bound is program else None
            except Exception as error:
                self._end_reading(error)
            part = stream.next_part(program, None if job is None else job.inputs)
            if own is not None and job is not None and part is not None:
                leaves, known = inside.engine.head_of(program, own.leaves, part)
                settled = job, replace(part, known=known)
        settled = stream.pass_job(settled, self._read)
        if settled is None:
            stream.drain()
            self._program = None
        else:
            job, part = settled
            inside.check_call(job, STREAM)
            inputs = inside.inputs_of(job, None if self._call is None else [self._call])
            self._admit(inputs if leaves is None else replace(inputs, leaves=leaves), part)

    def _admit(self, inputs: RankInputs, part: ReplicaPart) -> None:
        assert self.stream is not None
        inputs = self._inside.with_micro_batches(inputs, part.micro_batches // len(part.portions))
        target = self._call.target if self._call is not None else ()
        if self._is_last:
            target = target if self._is_leader else self._read_target()
            self._check_call(ModelCall((), {}, target))
        self._call = None
        self.stream.part = part
        self.stream.admit(replace(inputs, targets=target))
        self._read += 1

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
