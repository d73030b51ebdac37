"""A case: a random model as source code, how it becomes a pipeline, and the mini-batches it runs on."""

from __future__ import annotations

import dataclasses
import json
import random
import textwrap
from dataclasses import dataclass
from string import Template
from typing import Any

from random_models.kinds import KINDS, TWISTS
from random_models.operations import FUNCTIONS, LOSSES, MODULES, PLAIN, ROUTING, STATE, WRITES, Operation
from random_models.reads import READS

GROUPS = {
    "plain": PLAIN,
    "modules": MODULES,
    "functions": FUNCTIONS,
    "state": STATE,
    "routing": ROUTING,
    "writes": WRITES,
    "losses": LOSSES,
    "reads": READS,
}
TABLE: dict[str, Operation] = {
    name: row for group in (*GROUPS.values(), *KINDS.values()) for name, row in group.items()
}
OFTEN = {"plain": 8, "modules": 3, "functions": 1, "state": 2, "routing": 1, "writes": 1, "losses": 1, "reads": 2}
ALWAYS = ("x", "ids")  # inputs that every model has
DOUBLED = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "v_min")  # two stages on each device
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", *DOUBLED)
MODES = ("call", "step", "eval", "no_grad")


@dataclass(frozen=True, slots=True)
class Line:
    """An operation in a program."""

    name: str
    one: int  # which of the values so far, counted from the last
    two: int
    is_part: bool = False  # in a submodule of its own

    @property
    def operation(self) -> Operation:
        return TABLE[self.name]


@dataclass(frozen=True, slots=True)
class Batch:
    samples: int
    length: int
    mode: str  # "call" and backward, "step" (forward_backward), "eval", "no_grad" (but in training mode)
    updates: bool = True  # a step of SGD, and no gradients, afterwards
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    program: tuple[Line, ...]
    batches: tuple[Batch, ...]  # the first one is planned with
    stages: int = 2
    chunks: int = 3
    schedule: str = "1f1b"
    checkpoint: str = "never"
    by_hand: tuple[int, ...] = ()  # numbers of lines in submodules behind which a stage ends
    deferred: bool = False
    input_gradient: bool = False
    seed: int = 0
    twists: tuple[str, ...] = ()  # of TWISTS

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def operations(self) -> list[Operation]:
        return [line.operation for line in self.program]

    @property
    def inputs(self) -> tuple[str, ...]:
        used = {name for operation in self.operations for name in operation.inputs}
        return (*ALWAYS, *(name for name in ("state", "cache", "labels", "scale", "total") if name in used))

    @property
    def is_per_part(self) -> bool:
        return any(operation.per_part for operation in self.operations)

    @property
    def reads_size(self) -> bool:
        return any(operation.reads_size for operation in self.operations)

    @property
    def reading(self) -> frozenset[int]:
        """The numbers of lines that read values of inputs."""
        return frozenset(k for k, operation in enumerate(self.operations) if operation.reads_inputs)

    @property
    def is_random(self) -> bool:
        return any(operation.is_random for operation in self.operations)

    @property
    def kinds(self) -> list[str]:
        """The kinds of hidden state that the case has."""
        names = {line.name for line in self.program}
        return [*(kind for kind, operations in KINDS.items() if not names.isdisjoint(operations)), *self.twists]

    def changes(self, seed: int) -> str:
        """What the user does before a step, as source code about `model`."""
        texts = [
            Template(line.operation.change).substitute(k=k, self=f"model.part_{k}" if line.is_part else "model")
            for k, line in enumerate(self.program)
        ]
        return "\n".join([f"seed = {seed}", *texts])

    @property
    def tolerance(self) -> float:
        return max((operation.tolerance for operation in self.operations), default=1e-4)

    # -- text --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        fields: dict[str, Any] = json.loads(text)
        fields["program"] = tuple(Line(**line) for line in fields["program"])
        fields["batches"] = tuple(Batch(**batch) for batch in fields["batches"])
        fields["by_hand"] = tuple(fields["by_hand"])
        fields["twists"] = tuple(fields["twists"])
        return cls(**fields)


# -- drawing ---------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    groups = [*dice.sample([*GROUPS], dice.choice((2, 3, 4))), "plain"]
    names = [_name(dice, groups) for _ in range(dice.randint(2, 10))]
    program = tuple(
        Line(name, dice.randint(0, 6), dice.randint(0, 6), dice.random() < 0.4 and not TABLE[name].needs_root)
        for name in names
    )
    schedule = dice.choice(("1f1b", *SCHEDULES))
    parts = [number for number, line in enumerate(program) if line.is_part and "nn.Linear" in line.operation.init]
    ends = tuple(sorted(dice.sample(parts, min(len(parts), dice.randint(1, 2))))) if dice.random() < 0.15 else ()
    is_doubled = schedule in DOUBLED
    if is_doubled:
        ends = ()
    norm = any(name == "batch_norm" for name in names)
    return Case(
        program,
        _batches(dice, least=6 if norm else 2),
        len(ends) + 1 if ends else dice.randint(1, 2 if is_doubled else 4),
        dice.choice((1, 2, 3, 3)),
        schedule,
        dice.choice(("never", "except_last", "always")),
        ends,
        norm and dice.random() < 0.4,
        dice.random() < 0.25,
        seed,
    )


def draw_with_kinds(seed: int) -> Case:
    """The case of a seed, most of them with one or two kinds of hidden state besides."""
    case, dice = draw(seed), random.Random(f"kinds {seed}")
    kinds = dice.sample([*KINDS, *TWISTS], dice.choice((0, 1, 1, 2)))
    lines = [
        Line(dice.choice([*KINDS[kind]]), dice.randint(0, 3), dice.randint(0, 3), dice.random() < 0.4)
        for kind in kinds
        if kind in KINDS
    ]
    twists = tuple(kind for kind in kinds if kind in TWISTS)
    return dataclasses.replace(case, program=(*case.program, *lines), twists=twists)


def _name(dice: random.Random, groups: list[str]) -> str:
    group = GROUPS[dice.choices(groups, [OFTEN[name] for name in groups])[0]]
    if group is READS:
        return dice.choice([*group])
    return dice.choices([*group], [row.weight for row in group.values()])[0]


def _batches(dice: random.Random, least: int) -> tuple[Batch, ...]:
    lengths = (
        [dice.choice((4, 4, 4, 5)) for _ in range(4)]
        if dice.random() < 0.6
        else [dice.choice((2, 3, 4, 5, 7)) for _ in range(4)]
    )
    return tuple(
        Batch(dice.choice((least, least + 1, 6, 7, 8)), length, mode, dice.random() < 0.7, dice.randrange(10**6))
        for length, mode in zip(lengths, dice.choices(MODES, (5, 3, 3, 1), k=4), strict=True)
    )


# -- source ----------------------------------------------------------------------------------------------------------

HEAD = """import functools
import math
import operator
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""


def source(case: Case, is_oracle: bool = False) -> str:
    """The model as a Python module with a class M.

    `is_oracle`: the same for the judge, run on micro-batches: by number of the line, values of inputs are read from
    `WHOLE`, sizes that depend on them from `SIZED`, and what each loss weighs goes into `WEIGHTS`.
    """
    texts = [_Text(case, number, line, is_oracle) for number, line in enumerate(case.program)]
    inputs = ", ".join(case.inputs)
    top = [text.top for text in texts if text.top]
    parts = [text.part_class for text in texts if text.line.is_part]
    init = "\n".join(text.init for text in texts if text.init)
    tied = "self.tied = nn.Linear(4, 4)" if any(line.name == "tied" for line in case.program) else ""
    forward = "\n".join(text.forward for text in texts)
    last = f"h{len(texts)}"
    marks = ("WHOLE, SIZED, WEIGHTS = {}, {}, []",) if is_oracle else ()
    model = "\n".join(
        (
            "class M(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)",
            *([_indented(tied)] if tied else []),
            *([_indented(init)] if init else []),
            "",
            f"    def forward(self, {inputs}):",
            "        outputs, losses = [], []",
            "        h0 = self.first(x * 1)",
            *([_indented(forward)] if forward else []),
            f'        return {{"value": {last} + self.last(x * 1), "outputs": outputs, "losses": losses}}',
        )
    )
    return "\n\n\n".join(part.strip("\n") for part in (HEAD, *marks, *top, *parts, model)) + "\n"


def _indented(text: str, by: int = 8) -> str:
    return textwrap.indent(text.strip("\n"), " " * by)


class _Text:
    """One line of a program as text."""

    def __init__(self, case: Case, number: int, line: Line, is_oracle: bool):
        self.case, self.number, self.line, self.is_oracle = case, number, line, is_oracle
        before = ["x", *(f"h{i}" for i in range(number + 1))]
        self.values = [before[-1 - k % len(before)] for k in (line.one, line.two)]
        self.top = self._filled(line.operation.top)

    @property
    def init(self) -> str:
        return f"self.part_{self.number} = Part_{self.number}()" if self.line.is_part else self._own_init

    @property
    def _own_init(self) -> str:
        return self._filled(self.line.operation.init).strip("\n")

    @property
    def forward(self) -> str:
        if self.line.is_part:
            inputs = ", ".join((*self.values, *self.case.inputs))
            return f"h{self.number + 1} = self.part_{self.number}({inputs})"
        return self._filled(self.line.operation.forward, *self.values, f"h{self.number + 1}")

    @property
    def part_class(self) -> str:
        init = self._own_init
        return "\n".join(
            (
                f"class Part_{self.number}(nn.Module):",
                *(("    def __init__(self):", "        super().__init__()", _indented(init), "") if init else ()),
                f"    def forward(self, {', '.join(('v', 'w', *self.case.inputs))}):",
                _indented(self._filled(self.line.operation.forward, "v", "w", "out")),
                "        return out",
            )
        )

    def _filled(self, text: str, v: str = "v", w: str = "w", o: str = "o") -> str:
        whole, sized = (f"{name}[{self.number}]" for name in ("WHOLE", "SIZED"))
        reads = {name: f'{whole}["{name}"]' if self.is_oracle else name for name in ("ids", "x", "scale")}
        reads |= {f"sized_{name}": f'{sized}["{name}"]' if self.is_oracle else name for name in ("ids", "x")}
        lines = [self._weighed(line) for line in text.splitlines()]
        return Template("\n".join(line for line in lines if line is not None)).substitute(
            reads, k=self.number, v=v, w=w, o=o
        )

    def _weighed(self, line: str) -> str | None:
        if not line.startswith("#: "):
            return line
        return f"WEIGHTS.append({line[3:]})" if self.is_oracle else None
