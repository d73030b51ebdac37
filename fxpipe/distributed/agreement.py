"""Comparison of model, settings, versions, graph and plan between ranks, before anything depends on them.

If the texts of a field differ, the error on every rank names the field and which ranks have which text. Values of
parameters are not compared: only the ranks that hold a parameter use it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.distributed.failures import rank_names
from fxpipe.distributed.rank_group import RankGroup
from fxpipe.errors import ArgumentError
from fxpipe.planning.options.pipeline_options import Settings
from fxpipe.rewriting.program import Stage
from fxpipe.runtime.bound_program import BoundProgram
from fxpipe.scheduling import Schedule
from fxpipe.tracing.tensors import has_values

Fields = Mapping[str, str]
LONGEST_SHOWN = 120
COMPARED_SETTINGS = (
    *("placement", "chunks", "schedule", "checkpoint", "balance", "pins", "tracer", "check", "in_dims", "out_dims"),
    *("dynamic_shapes", "leaf_modules", "deferred_batch_norm", "compile"),
)


def check_agreement(group: RankGroup, own: Fields, *, between_replicas: bool = True, is_long: bool = True) -> None:
    """Compares the fields of ranks in all replicas, or in this one. Raises `ArgumentError` on all ranks if they differ.

    `is_long`: ranks may be planning or recording; if False, all must answer within the timeout.
    """
    what, replicas = "what the other ranks have", group.replica_count if between_replicas else 1
    if between_replicas:
        everybody = [fields for row in group.everybody(dict(own), what, is_long=is_long) for fields in row]
    else:
        everybody = group.connection.all_gather(dict(own), what, is_long=is_long)
    problems = []
    for field in own:
        ranks: dict[str, list[int]] = {}
        for rank, fields in enumerate(everybody):
            ranks.setdefault(fields.get(field, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{rank_names(those, len(everybody) // replicas, replicas)}: {_around_difference(text, [*ranks])}"
                for text, those in ranks.items()
            )
            problems.append(f"{field} ({values}): give all ranks the same")
    if problems:
        raise ArgumentError("ranks differ in " + "; and in ".join(problems))


def _around_difference(text: str, texts: Sequence[str]) -> str:
    """Returns the part of a text where it first differs from the others."""
    if len(text) <= LONGEST_SHOWN:
        return text
    columns = enumerate(zip(*texts, strict=False))
    first = next((k for k, letters in columns if len({*letters}) > 1), min(map(len, texts)))
    start = max(0, first - LONGEST_SHOWN // 4)
    return f"... {text[start : start + LONGEST_SHOWN]} ..."


def model_fields(model: nn.Module, settings: Settings) -> Fields:
    """Returns the fields that must be equal before there is a plan."""
    from fxpipe import __version__

    tensors = [
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if has_values(tensor) else " without values")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return {
        "versions": f"torch {torch.__version__}, fxpipe {__version__}, Python {sys.version.split()[0]}",
        "model": f"{type(model).__qualname__}: {', '.join(tensors)}",
        **{name: _value_text(getattr(settings, name)) for name in COMPARED_SETTINGS},
    }


def _value_text(value: Any) -> str:
    """Returns a text without addresses, which is equal in other processes."""
    if isinstance(value, Schedule):
        value = str(value)
    elif callable(value):
        value = getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def graph_fields(fingerprint: str, bound: BoundProgram, placement: Sequence[int], settings: Settings) -> Fields:
    """Returns the fields that must be equal for a recorded graph and its stages."""
    return {
        "graph": f"fingerprint {fingerprint}",
        "plan": f"stages on ranks {tuple(placement)}, chunks {settings.chunks}, checkpoint {settings.checkpoint}, "
        f"schedule {_value_text(settings.schedule)}",
        **{f"stage {j}": _digest(stage) for j, stage in enumerate(bound.program.stages)},
    }


def _digest(stage: Stage) -> str:
    code = re.sub(r" +#.*", "", stage.code)  # paths of source lines may differ between machines
    text = repr((code, stage.attributes, stage.receives, stage.sends, stage.assigns))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
