"""What tests of the command share: plans made by hand, and the one line that a mistake ends in."""

import pytest

from fxpipe.inspect.cli import main
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import Portal, StageBytes, StagePlan
from fxpipe.utils.polynomial import ZERO, Polynomial

MIB = 2**20


def make_plan(
    stages: int = 2,
    chunks: int = 4,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    portals: tuple[Portal, ...] = (),
) -> Plan:
    """Stage j takes j + 1 ms forward and twice that back."""
    return Plan(
        stages=tuple(
            StagePlan(
                index=j,
                device="cpu",
                nodes=(f"layer{j}_linear", f"layer{j}_relu"),
                code=f"def stage_{j}(x): ...",
                forward_seconds=1e-3 * (j + 1),
                backward_seconds=2e-3 * (j + 1),
                parameter_bytes=10 * MIB,
                activation_bytes=4 * MIB,
                sent_bytes=MIB if j < stages - 1 else 0,
                state_bytes=10 * MIB,
                bytes=StageBytes(Polynomial.in_b(MIB) if j else ZERO, Polynomial.in_b(0, 2 * MIB)),
            )
            for j in range(stages)
        ),
        portals=portals,
        devices=("cpu",) * stages,
        schedule=schedule,
        chunks=chunks,
        micro_batch=2,
        checkpoint=checkpoint,
        balance="block",
        fingerprint="0123456789abcdef",
    )


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command leaves on standard error."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fxpipe.inspect: ")
    return lines[0]
