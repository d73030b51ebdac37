"""The record of a step over processes, put together from those of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fxpipe.runtime import StepRecord
from fxpipe.scheduling.actions import Action


def gathered_record(records: Sequence[StepRecord | None]) -> StepRecord | None:
    """Joins the records of all ranks, by rank; None where they have run no step.

    A transfer is in the record of who received it; what an action has sent is summed here.
    """
    known = [record for record in records if record is not None]
    if not known:
        return None
    transfers = tuple(transfer for record in known for transfer in record.transfers)
    sent: Counter[Action] = Counter()
    for transfer in transfers:
        sent[transfer.maker] += int(transfer.bytes)
    actions = sorted(
        (replace(one, sent=sent[one.action]) for record in known for one in record.actions), key=lambda one: one.start
    )
    devices = tuple(
        replace(record.devices[d], sent=sum(one.sent for one in actions if one.device == d))
        for d, record in enumerate(known)
    )
    return replace(known[0], actions=tuple(actions), transfers=transfers, devices=devices)
