"""A Trainer of transformers for pipes: accumulation steps become the micro-batches of one pipelined step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from fxpipe.errors import ArgumentTypeError, StateError
from fxpipe.pipe.pipeline_module import Pipeline
from fxpipe.utils.accelerator import generator_position, used_generators
from fxpipe.utils.pytree import map_tensor_leaves
from fxpipe.utils.units import with_article


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` that runs the batches of an update as the micro-batches of one step of a pipe.

        settings = TrainingArguments("output", per_device_train_batch_size=2, gradient_accumulation_steps=8)
        trainer = PipelineTrainer(model=fxpipe.pipeline(model, devices), args=settings, train_dataset=dataset)

    Each of the 8 batches is a micro-batch, and their lengths may differ. They run in the schedule of the pipe, whose
    `chunks` are not used. Losses, gradients and checkpoints are as with `Trainer`. With `gradient_accumulation_steps=1`
    it calls the pipe, as `Trainer` does.

    You may override `compute_loss` if it calls the model once. For each micro-batch it runs up to that call, to get the
    inputs, and again from the beginning in a worker, where the call returns the output. For another subclass of
    Trainer: `class PipelineSeq2SeqTrainer(PipelineTrainer, Seq2SeqTrainer): pass`.
    """

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._micro_batches: list[dict[str, Any]] = []  # the batches of an update so far
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.args.gradient_accumulation_steps == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        if not isinstance(model, Pipeline):
            raise ArgumentTypeError(
                f"model is {with_article(model)}; expected a pipe: PipelineTrainer(model=fxpipe.pipeline(model, ...)). "
                "Adapt the model before you make the pipe, and start one process"
            )
        self._micro_batches.append(dict(self._prepare_inputs(inputs)))
        if len(self._micro_batches) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)  # the last batch returns the loss of all
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()

        def loss_of(output: Any, target: tuple[dict[str, Any], Any]) -> Any:
            output = map_tensor_leaves(self._as_trainers_see, output)
            with torch.autocast(self.args.device.type, enabled=False):
                loss = self._loss_with(_ModelCall(model, lambda *_, **__: output), *target)
            return loss if self._is_scaled(target[1]) else loss / self.current_gradient_accumulation_steps

        calls = [self._call_of_model(model, one, num_items_in_batch) for one in self._micro_batches]
        with self.accelerator.autocast():
            loss = model.forward_backward(
                micro_batches=calls, loss_fn=loss_of, reduction="sum", grad_scaler=self.accelerator.scaler
            )
        return loss.to(self.args.device)

    def _as_trainers_see(self, output: torch.Tensor) -> torch.Tensor:
        """Converts an output to float32 under autocast, as Accelerate does; copies a loss, which `*=` may change."""
        if self.accelerator.native_amp and output.dtype in (torch.float16, torch.bfloat16):
            return output.float()
        return output.clone() if output.dim() == 0 else output

    def _loss_with(self, call: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        return self.compute_loss(call, dict(inputs), num_items_in_batch=num_items_in_batch)

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Returns True if, by the Trainer's rule, `compute_loss` divides by the number of items of all batches."""
        if (stated := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(stated)
        return self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)

    def _call_of_model(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any, Any]:
        """Returns the inputs that `compute_loss` passes to the model, and as target the arguments of `compute_loss`."""

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _CalledError(args, kwargs)

        drawn = _random_positions()
        try:
            self._loss_with(_ModelCall(model, stop), inputs, num_items_in_batch)
        except _CalledError as called:
            if drawn != _random_positions():
                raise StateError(
                    "compute_loss draws random numbers before it calls the model, and would draw others for the loss; "
                    "draw them in the data collator, or in the model"
                ) from None
            return *called.args, (inputs, num_items_in_batch)
        raise StateError("compute_loss has not called the model; PipelineTrainer needs exactly one call")


def _random_positions() -> list[Any]:
    return [generator_position(generator) for generator in (torch.default_generator, *used_generators())]


class _CalledError(Exception):
    """The inputs that the model was called with."""


class _ModelCall:
    """Replaces the model in `compute_loss`, with another `__call__`."""

    def __init__(self, model: Any, call: Callable[..., Any]):
        self._model, self._call, self._is_called = model, call, False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_called:
            raise StateError("compute_loss has called the model twice; PipelineTrainer needs exactly one call")
        self._is_called = True
        return self._call(*args, **kwargs)
