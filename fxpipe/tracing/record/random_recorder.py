"""Records random numbers: which draws forward reads, who draws Python's numbers, and whether forward seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.forward_rng import DrawStream, generator_states
from fxpipe.tracing.model_state import python_rng_state, same_python_rng_state

if TYPE_CHECKING:
    from fxpipe.tracing.record.recorder import Recorder


class RandomRecorder:
    """The random numbers of one recording. `seed`: of the numbers that forward draws and reads."""

    def __init__(self, recorder: Recorder, seed: int):
        self.recorder = recorder
        self.seed, self.stream = seed, DrawStream(seed)
        self.draws_from_stream: list[bool] = []  # for each draw, whether it came from the stream
        self.python_modules: set[str] = set()  # paths of modules that draw Python's random numbers
        self._python_state = python_rng_state()
        self._seed_of_generator = torch.default_generator.initial_seed()
        self._draw_starts = set[tuple[bytes, str]]()  # generator states in which a draw has begun

    def note_python(self) -> None:
        """Records, before another module runs, whether the current one drew Python's random numbers."""
        now = python_rng_state()
        if not same_python_rng_state(self._python_state, now):
            self.python_modules.add(self.recorder.module)
        self._python_state = now

    def skip_python(self) -> bool:
        """Ignores Python's draws since the last check: opaque calls repeat them. Returns whether there were any."""
        before, self._python_state = self._python_state, python_rng_state()
        return not same_python_rng_state(before, self._python_state)

    @contextlib.contextmanager
    def ignore_draws(self) -> Iterator[None]:
        """A block that runs Python of forward once more."""
        drawn = len(self.draws_from_stream)
        yield
        del self.draws_from_stream[drawn:]

    def seed_generator(self, seed: int) -> None:
        """Seeds torch's generator before forward runs, in order to detect seeding in forward."""
        torch.default_generator.manual_seed(seed)
        self._seed_of_generator = seed

    def check_generator(self) -> None:
        """Raises `CannotRecord` if forward left torch's generator in a state that draws do not lead to."""
        self.refuse_seeding(torch.default_generator.initial_seed(), generator_states())

    def refuse_seeding(self, seed: int, states: list[Any]) -> None:
        """Raises `CannotRecord` if a draw began with another seed, or in a state in which another draw has begun."""
        start = None if is_faked() else (bytes(states[0].tolist()), repr(states[1:]))  # fake draws do not advance it
        if seed != self._seed_of_generator or start in self._draw_starts:
            raise self.recorder.refuse(
                "seeds torch's random generator, or resets it (manual_seed, fork_rng, set_rng_state),",
                "draw these numbers in __init__ and keep them (register_buffer), or in a module of their own that is "
                "kept whole (leaf_modules=)",
                whole=False,
            )
        if start is not None:
            self._draw_starts.add(start)
