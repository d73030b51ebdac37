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
from typing import Any, NamedTuple

import torch

from fxpipe.distributed.device_transfers import WAITED_FOR
from fxpipe.distributed.held_tensors import RankProgram, share_buffers
from fxpipe.distributed.packets import JOB_TAG, PacketLink, PacketValue, tag_of
from fxpipe.distributed.rank_engine import RankEngine, RankGradients, RankInputs, open_mailbox
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.distributed.rank_state import STREAM, RankState
from fxpipe.distributed.rank_step import RankExchange
from fxpipe.distributed.replicas import (
    NEXT_MINI_BATCH,
    ReplicaPart,
    StageParameter,
    loss_of_replica,
    parameters_of_loss,
)
from fxpipe.errors import ArgumentError, DistributedError, InternalError
from fxpipe.pipe.model_calls import ModelCall, parse_call
from fxpipe.pipe.train_stream import StreamLoop, TrainStream, check_can_stream_now
from fxpipe.rewriting.relay_routes import RelayRoutes
from fxpipe.runtime.caller_context import CallerContext
from fxpipe.runtime.loss_checks import LossEvidence, LossHistory, LossVerdict, wrong_loss
from fxpipe.runtime.stage_updates import OverlappedUpdates
from fxpipe.runtime.step import Step
from fxpipe.runtime.step_inputs import GivenInputs
from fxpipe.runtime.stream import Stream, StreamStep
from fxpipe.scheduling.actions import Action, ActionKind, Rows
from fxpipe.scheduling.streams import StreamSchedule
from fxpipe.utils.pytree import map_tensor_leaves


class LossReport(NamedTuple):
    """The loss report of the rank of the last stage for a mini-batch: values of a packet, with tensors on the CPU."""

    loss: torch.Tensor  # over all replicas, as the divisor
    divisor: Any  # divides gradients; or None
    shares: torch.Tensor  # by micro-batch
    is_verified: bool  # True if the loss of all outputs together was compared with the sum over micro-batches


class RankStreamStep(StreamStep):
    """A mini-batch of a stream on one rank. The rank of the last stage has the loss; all ranks get its report."""

    exchange: RankExchange
    group: RankGroup
    part: ReplicaPart
    first_changes_buffers: bool  # forward changes buffers of this stage on the first replica
    report: LossReport | None = None  # None until it arrives

    @property
    def divisor(self) -> Any:
        return None if self.report is None else self.report.divisor

    @torch.no_grad()
    def commit_buffers_of(self, j: int) -> None:
        """Writes the buffers that a stage has changed: the first replica's on all replicas."""
        if self.group.replica == 0:
            super().commit_buffers_of(j)
        if self.group.replica_count > 1 and self.first_changes_buffers:
            ((bound, tensors),) = self.open_programs
            share_buffers(self.group, tensors, bound.program.stages[j].changes)


def _rank_step(one: StreamStep) -> RankStreamStep:
    assert isinstance(one, RankStreamStep)
    return one


class RankStream(Stream):
    """The mini-batches of one `train_stream` call on one rank."""

    engine: RankEngine

    def __init__(
        self, engine: RankEngine, context: CallerContext, order: StreamSchedule, *more: Any, routes: RelayRoutes
    ):
        group, placement = engine.group, routes.placement
        (self._stage,) = [j for j in range(order.stages) if routes.is_here(j, group.rank)]
        self._is_last = self._stage == order.stages - 1
        self.mailbox = open_mailbox(group, {}, routes)
        self.packets = PacketLink(self.mailbox, placement, (), order)
        self._waiting: tuple[Action, ...] = ()  # queued actions that have not run
        self._replicas = engine.replicas
        # For the current segment; `_summed` has the parameters in the reduction, the same on all replicas.
        self._summed: Mapping[StageParameter, torch.Tensor] = {}
        self._first_changes_buffers = False  # forward, on replica 0
        self.part = ReplicaPart(0, 0, 0)  # of the mini-batch that is admitted
        super().__init__(engine, context, order, *more)
        self.stages = (self._stage,)

    def wait(self, action: Action) -> None:
        if self.failure is not None:
            return
        maker = self.packets.maker_before(action)
        if maker is not None:
            values = self.packets.receive(maker)
            one, own = self._at(maker)
            step = _rank_step(one)
            if own.kind is ActionKind.BACKWARD and own.micro_batch == 0:  # the next stage has taken the job before
                t, _ = self._order.place(maker.micro_batch)
                self.mailbox.finish_send(("job", self._stage, t), f"mini-batch {t} of the stream to be taken")
            if self._is_end(one, own):
                size = len(LossReport._fields)
                values, report = values[:-size], values[-size:]
                step.report = LossReport(*(one.value for one in report))
            step.exchange.enter_packet(own, values)
        self.engine.group.doing = str(action)

    def pass_on(self, action: Action) -> None:
        one, own = self._at(action)
        step, is_end = _rank_step(one), self._is_end(one, own)
        if is_end and self._is_last:
            step.report = self._loss_report(one)
        if self.packets.is_sent(action):
            report = map(PacketValue, step.report) if is_end and step.report is not None else ()
            self.packets.send(action, [*step.exchange.take_packet(own), *report])
        super().pass_on(action)

    def pass_job(self, job: Any, t: int) -> Any:
        """Forwards the leader's job for mini-batch t, or the end of the segment; returns it on all ranks."""
        j, tag, placement = self._stage, tag_of(t, JOB_TAG), self.packets.placement
        if j:
            address = ("job", j - 1, t), tag, placement[j - 1]
            self.mailbox.expect(*address)
            ((job, _),) = self.mailbox.receive(*address, f"mini-batch {t} of the stream")
        if not self._is_last:
            self.mailbox.send(("job", j, t), tag, placement[j + 1], [PacketValue(job)])
        return job

    @staticmethod
    def _is_end(one: StreamStep, own: Action) -> bool:
        """Returns whether this is the last backward of a mini-batch in a stage."""
        return own.kind is ActionKind.BACKWARD and own.micro_batch == one.micro_batches - 1

    def begin_segment(self, inputs: RankInputs) -> ReplicaPart:
        """Returns this replica's part in the first mini-batch of a graph. All ranks call it."""
        engine = self.engine
        engine.refuse_sharing(inputs.union)
        gradients = RankGradients(engine, inputs)
        self._summed = gradients.parameters
        part = engine.begin(inputs, gradients, self.loss.reduction, self._is_last, in_stream=True)
        self._first_changes_buffers = part.changes_buffers
        return part

    def next_part(self, program: RankProgram, inputs: RankInputs | None) -> ReplicaPart | None:
        """Returns this replica's part in a mini-batch of the segment; None if any replica has none. For leaders."""
        start = None
        if inputs is not None:
            own_inputs = replace(inputs, bounds=(program,), union=program)
            start = self.engine.start_of(own_inputs, self.loss.reduction, self._summed, in_stream=True)
        return self._replicas.begin(start, program.combinations, in_stream=True)

    def _history_of(self, given_inputs: GivenInputs) -> LossHistory:
        if self._is_last:
            return super()._history_of(given_inputs)
        return LossHistory(is_cheap=True, passes=1)  # looks at elements, and does not verify

    def _open(self, given_inputs: GivenInputs, history: LossHistory, is_verified: bool, **more: Any) -> StreamStep:
        assert isinstance(given_inputs, RankInputs)
        part, engine, is_last = self.part, self.engine, self._is_last
        step = RankStreamStep(
            engine.own_inputs(given_inputs),
            engine.model,
            part.seed,
            losses=engine.losses_of_part(given_inputs, part, self.loss, is_verified) if is_last else None,
            look_at_elements=history.look_at_elements and part.micro_batches > 1,
            **engine.part_of_step(given_inputs),
            **more,
        )
        step.group, step.part, step.first_changes_buffers = engine.group, part, self._first_changes_buffers
        step.first_micro_batch = part.first
        return step

    def _queue(self, rows: Rows) -> None:
        """Queues rows, and runs the rows queued before."""
        self.packets.queue(rows, self.engine.group.rank)
        self._run_waiting(rows[self._stage])

    def _run_waiting(self, row: tuple[Action, ...]) -> None:
        due, self._waiting = self._waiting, row
        self.engine.executor.start(self, (due,))
        self._raise_failure()

    def drain(self) -> None:
        super().drain()
        self._run_waiting(())
        self.mailbox.settle()

    def _loss_report(self, one: StreamStep) -> LossReport:
        """Makes the report of a mini-batch. Raises `LossError` if its micro-batches do not add up to its loss."""
        stage = one.loss
        assert stage is not None
        losses = stage.losses
        self.engine.refuse_strange_leaves(stage)
        replicas, step = self._replicas, _rank_step(one)
        if replicas.count > 1 and stage.bound.is_weighed:
            one.is_verified = False  # the micro-batches of all replicas add up to the loss, which is not verified here
        loss, divisor = super()._checked_loss(one), losses.divisor
        if replicas.count > 1:
            own = loss_of_replica(losses), len(parameters_of_loss(step))
            reports = replicas.group.replicas.all_gather(own, "the losses of the other replicas")
            of_replicas = [of_replica for of_replica, _ in reports]
            loss, divisor = replicas.loss_of_union(of_replicas, step.part, self.loss.reduction)
            if any(count for _, count in reports):
                replicas.sum_of_loss(step, {})
        loss, divisor = map_tensor_leaves(lambda t: t.detach().cpu(), (loss, divisor))
        shares = [float(losses.share(i) * losses.scale) for i in range(one.micro_batches)]
        return LossReport(loss, divisor, torch.tensor(shares, dtype=torch.float64, device="cpu"), one.is_verified)

    def _update_stage(self, steps: Sequence[Step], j: int, updates: OverlappedUpdates) -> None:
        """Sums the gradients of a stage over replicas and updates its parameters."""
        for step in steps if self._replicas.count > 1 else ():
            assert isinstance(step, RankStreamStep)
            self._sum_over_replicas(step, j)
        self.engine.update_stage(steps, j, updates)

    def _sum_over_replicas(self, step: RankStreamStep, j: int) -> None:
        """Sums the gradients of a stage over replicas. Raises `LossError` if element weights differ between them."""
        replicas, own = self._replicas, {(name, j): gradient for name, gradient in step.totals[j].sums.items()}
        report, check = step.report, step.loss_weighting
        assert report is not None
        shares = report.shares.tolist()
        wrong, wrong_means = (check.difference(shares.__getitem__, means_only=only) for only in (False, True))
        is_verified = report.is_verified
        of_stage = LossEvidence(wrong, wrong_means, is_verified, is_verified, shares, dict(check.gradients))
        gradient_report = replicas.reduction.begin().give_rest(own)
        reports = replicas.group.replicas.all_gather((of_stage, gradient_report), WAITED_FOR)
        evidence, gradients = [[one] for one, _ in reports], [one for _, one in reports]
        LossVerdict(evidence, firsts=step.part.firsts).check(None, 0)
        total = replicas.finish_sum(own, gradients)
        if replicas.group.device_sums is not None:  # if a device hangs for some replicas, none goes on
            replicas.group.replicas.all_gather(None, WAITED_FOR)
        step.totals[j].sums = {name: gradient for (name, _), gradient in total.items()}
        if any(one.sparse for one in gradients):
            self._summed = replicas.reducible(self._summed)
            replicas.prepare_sum(self._summed)

    def _checked_loss(self, one: StreamStep) -> torch.Tensor:
        step = _rank_step(one)
        report = step.report
        if report is None:
            raise InternalError("a mini-batch has ended without a report of its loss")
        step.exchange.check_empty()
        if not self._is_last and not report.is_verified:
            wrong = step.loss_weighting.difference(report.shares.__getitem__, means_only=True)
            if wrong is not None:
                raise wrong_loss(wrong)
        return report.loss.to(self.engine.group.device)


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
        self._admit(inputs, self.stream.begin_segment(inputs))

    def _go_on(self, program: RankProgram) -> None:
        """Admits the next mini-batch of the segment, or ends it."""
        stream, inside, settled = self.stream, self._inside, None
        assert stream is not None
        if self._is_leader:
            job, seed = None, self._seed_of_next()
            try:
                own = None if self._call is None else inside.find_known(self._call, seed)
                job = inside.job_of(STREAM, own, seed) if own is not None and own.bound is program else None
            except Exception as error:
                self._end_reading(error)
            part = stream.next_part(program, None if job is None else job.inputs)
            settled = None if job is None or part is None else (job, part)
        settled = stream.pass_job(settled, self._read)
        if settled is None:
            stream.drain()
            self._program = None
        else:
            job, part = settled
            inside.check_call(job, STREAM)
            self._admit(inside.inputs_of(job, None if self._call is None else [self._call]), part)

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
