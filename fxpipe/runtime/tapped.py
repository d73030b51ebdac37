"""Compiled code with taps, called as code with a tape is: it makes the taps, and writes the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.autograd.graph import get_gradient_edge

from fxpipe.rewriting.program import Stage
from fxpipe.rewriting.tape import Tape, Use, check_unchanged
from fxpipe.rewriting.taps import Tap, Taps


class Tapped:
    """A function of (tape or None, attributes..., received values...)."""

    def __init__(self, stage: Stage, taps: Taps, code: Callable[..., tuple[Any, ...]]):
        self.taps, self.code = taps, code
        self.attributes = stage.attributes
        place = {name: k for k, name in enumerate(stage.attributes)}
        self.places = [tuple(place[name] for name in tap.names if name is not None) for tap in taps.taps]
        self._shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # of taps, by what was measured

    def __call__(self, tape: Tape | None, *args: Any) -> tuple[Any, ...]:
        """Taps are there without a tape too: what F throws away is then the graph that R makes, compiled once."""
        taps = self._taps(args)
        made = self.code(*taps, *args)
        outputs, kept = made[: len(made) - len(taps)], made[len(made) - len(taps) :]
        if tape is not None:
            for tap, places, leaf, x in zip(self.taps.taps, self.places, taps, kept, strict=True):
                if leaf is not None:
                    tape.note(get_gradient_edge(leaf), _use(tape, tap, [args[k] for k in places], x))
        return outputs

    def _taps(self, args: Sequence[Any]) -> list[torch.Tensor | None]:
        """One for each node that has a gradient to leave to W."""
        if not torch.is_grad_enabled():
            return [None] * len(self.places)
        received = args[len(self.attributes) :]
        sizes = tuple(received[m.place].shape[m.dim] // m.factor for m in self.taps.measures)
        shapes = self._shapes.get(sizes)
        if shapes is None:
            values = {m.symbol: size for m, size in zip(self.taps.measures, sizes, strict=True)}
            shapes = self._shapes[sizes] = [tuple(_number(size, values) for size in t.shape) for t in self.taps.taps]
        made: list[torch.Tensor | None] = []
        for tap, shape, places in zip(self.taps.taps, shapes, self.places, strict=True):
            weights = [args[k] for k in places]
            if any(weight.requires_grad for weight in weights):
                steps, of_w = (0,) * len(shape), weights[0]
                leaf = torch.empty_strided(shape, steps, dtype=tap.dtype or of_w.dtype, device=of_w.device)
                made.append(leaf.requires_grad_())
            else:
                made.append(None)
        return made


def _number(size: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    return int(size.subs(values))


def _use(tape: Tape, tap: Tap, weights: Sequence[torch.Tensor], x: torch.Tensor | None) -> Use:
    """What W does for one split node that was applied to `x`; None: its gradients do not hang on that."""
    names = [name for name in tap.names if name is not None]
    wants = [weight.requires_grad for weight in weights]
    wants_w, wants_b = wants[0], len(wants) > 1 and wants[1]
    bare = [tape.detached(name, weight) for name, weight in zip(names, weights, strict=True)]
    w, b = bare[0], bare[1] if len(bare) > 1 else None
    version = 0 if x is None else x._version

    def weigh(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        if x is not None:
            check_unchanged(x, version, names[0])
        return tap.weigh(gradient, x, w, b, wants_w, wants_b)

    return Use(tuple(name for name, wanted in zip(names, wants, strict=True) if wanted), weigh)
