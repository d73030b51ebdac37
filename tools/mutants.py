"""Do the tests see faults? Puts them into a copy of the package, one at a time, and runs the tests that should see it.

    make mutants                            # or: python tools/mutants.py
    python tools/mutants.py --only runtime  # those whose file, text or tests have this in them
    python tools/mutants.py --list

A fault that no test sees *survives*: then a test is missing, or the fault changes nothing that anybody could see and is
*equivalent*; the list says why. The status is 1 where one has survived.

A fault is what somebody could have written: a bound that is off by one, a fence left out, a sign, the last for the
first, an `Exception` for a `BaseException`, in place for out of place, a check that is skipped. The list is kept up to
date with the code: what is to be replaced has to stand in its file exactly once, which a test holds.

The tests have to pass without a fault, which is seen to first. Each job has a copy of its own. Tests run in a fork of
this process, which has imported torch and pytest but nothing of the package, so that a run takes a second or two where
Python alone would take three to begin.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("fxpipe", "tests", "tools", "examples", "pyproject.toml", "README.md")
# What takes longer hangs, and is caught: so many seconds, and so many times what the tests take without a fault. A
# test file that is slow where much else runs must not count as one that has seen the fault.
LIMIT, TIMES = 60.0, 6.0
PRELOADED = (
    "torch hypothesis numpy sympy pytest torch.fx torch.export torch._subclasses.fake_tensor "
    "torch.fx.experimental.symbolic_shapes torch.utils.checkpoint torch.utils.flop_counter torch.profiler"
).split()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, and the tests that should see it."""

    file: str  # below `fxpipe/`
    before: str  # stands in the file once
    after: str
    tests: str  # files below `tests/`, or tests in them; several with spaces between
    why_equivalent: str = ""  # why nobody could see it; it is not run

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}: {before} -> {after or '(nothing)'}"

    def apply(self, text: str) -> str:
        """The file's text with the fault."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(
                f"{self}\n  what is to be replaced stands {count} times in fxpipe/{self.file}: the code has changed, "
                "bring the list in tools/mutants.py up to date"
            )
        return text.replace(self.before, self.after)


# -- the list --------------------------------------------------------------------------------------------------------

RUNTIME = (
    Mutant(
        "planning/options/parse.py",
        "plan is not None and plan.schedule == schedule else 1",
        "plan is not None else 1",
        "attacks/test_streams_of_plans.py::test_a_mini_batch_runs_as_a_whole_over_a_plan_for_another_schedule",
    ),
    Mutant(
        "utils/accelerator.py",
        "dict.fromkeys((None, *here))",
        "(None, *range(device_count()))",
        "unit/utils/test_accelerator.py::test_no_device_but_the_pipes_is_made_current",
    ),
    Mutant(
        "runtime/stream.py",
        "        if self.newest in self._views:\n",
        "        if False:\n",
        "behaviour/test_pipedream.py::test_a_stream_comes_to_the_weights_of_delayed_updates",
    ),
    Mutant(
        "runtime/stream.py",
        "in self._named.values()]\n        self.hide_gradients()\n\n\n",
        "in self._named.values()]\n\n\n",
        "behaviour/test_pipedream.py::test_what_looks_for_gradients_in_the_middle_of_a_stream_is_told_that_there_are_none",
    ),
    Mutant(
        "optim.py",
        "        if not self.pipe._fxpipe.engine.is_streaming:\n",
        "        if True:\n",
        "behaviour/test_pipedream.py::test_zero_grad_in_the_middle_of_a_stream_loses_no_gradient",
    ),
    Mutant(
        "pipe/train_stream.py",
        "nullcontext() if stream is None else stream.at_rest()",
        "nullcontext()",
        "unit/runtime/test_stream_replicas.py::test_another_shape_ends_the_rounds_before_it",
    ),
    Mutant(
        "partitioning/optimal.py",
        "return 1 + int(spare // (older / (site.versions - 1)))",
        "return int(spare // (older / (site.versions - 1)))",
        "unit/planning/plans/test_weight_versions.py",
    ),
    Mutant(
        "runtime/stream.py",
        "        one.commit_buffers_of(j)\n",
        "        pass\n",
        "behaviour/test_pipedream.py::test_batch_norm_sees_the_mini_batches_in_order",
    ),
    Mutant(
        "scheduling/streams.py",
        "before = [Action(ActionKind.UPDATE, j, first - 1)] if first else []",
        "before = []",
        "unit/scheduling/test_streams.py::test_rows_of_replicas_run_and_every_forward_finds_its_version",
    ),
    Mutant(
        "scheduling/streams.py",
        "for h in range(max(first, i - count + 1), i)",
        "for h in range(i, i)",
        "unit/scheduling/test_streams.py::test_rows_of_replicas_run_and_every_forward_finds_its_version",
    ),
    Mutant(
        "scheduling/streams.py",
        "version = self.version(j, t) if k < count else 0",
        "version = 0",
        "unit/scheduling/test_streams.py::test_rows_of_replicas_run_and_every_forward_finds_its_version",
    ),
    Mutant(
        "scheduling/streams.py",
        "            if rounds[-1] < self.admitted:\n",
        "            if False:\n",
        "unit/scheduling/test_streams.py::test_mini_batches_go_round_and_rounds_cover_all_of_them_once",
    ),
    Mutant(
        "runtime/stream.py",
        "if replicas > 1 and stage.changes",
        "if False",
        "unit/runtime/test_stream_replicas.py::test_batch_norm_sees_the_mini_batches_in_order",
    ),
    Mutant(
        "runtime/bound_program.py",
        "replicas=tuple((*own[turn:], *own[:turn]) for own, turn in turns)",
        "replicas=tuple(own for own, _ in turns)",
        "unit/runtime/test_stage_replicas.py::test_a_mini_batch_of_a_stream_sees_the_replicas_in_the_order_of_its_turns",
    ),
    Mutant(
        "runtime/engine.py",
        "if total is None or len(mini_batches) == 1 else total / len(mini_batches)",
        "if total is None or len(mini_batches) == 1 else total",
        "unit/runtime/test_stream_replicas.py::test_a_stream_comes_to_the_weights_of_delayed_updates_by_rounds",
    ),
    Mutant(
        "optim.py",
        "sorted(state.items(), key=lambda entry: entry[0] if isinstance(entry[0], int) else math.inf)",
        "state.items()",
        "behaviour/test_stage_optimizers.py::test_it_steps_whatever_the_schedule_and_tied_weights_once",
        "depends on which worker is first",
    ),
    Mutant(
        "optim.py",
        "all(equal_values(values[0], value) for value in values)",
        "True",
        "behaviour/test_stage_optimizers.py::test_an_optimizer_that_computes_something_of_all_parameters_is_refused",
    ),
    Mutant(
        "optim.py",
        "        if not equal_values(chosen, other):",
        "        if False:",
        "behaviour/test_stage_optimizers.py::test_bad_input_is_refused",
    ),
    Mutant(
        "runtime/stage_updates.py",
        "for k in sorted(sharing) for action in back[k]",
        "for k in () for action in back[k]",
        "unit/runtime/test_stage_replicas.py::test_in_whatever_order_a_step_with_updates_has_the_same_bits",
    ),
    Mutant(
        "runtime/engine.py",
        "if is_repeatable and LossVerdict",
        "if LossVerdict",
        "behaviour/test_overlapped_updates.py::test_padding_that_comes_later_is_an_error_that_says_so",
    ),
    Mutant(
        "runtime/stage_updates.py",
        "for j in sorted(stages) if placement[j] == d)",
        "for j in sorted(stages) if d == 0)",
        "behaviour/test_stage_optimizers.py::test_stages_step_in_their_workers_and_hooks_see_the_optimizer_once",
    ),
    Mutant(
        "runtime/commit.py",
        "if count < 2 or new.is_sparse",
        "if count < 1 or new.is_sparse",
        "unit/runtime/test_commit.py::test_the_first_gradient_of_a_sum_is_not_written_to",
    ),
    Mutant(
        "runtime/commit.py",
        "return have + new if count < 2",
        "return have - new if count < 2",
        "unit/runtime/test_commit.py::test_the_first_gradient_of_a_sum_is_not_written_to",
    ),
    Mutant(
        "runtime/commit.py",
        "finish, ctx.finish = ctx.finish, None",
        "finish = ctx.finish",
        "unit/runtime/test_commit.py::test_it_runs_once_and_cannot_be_differentiated",
    ),
    Mutant(
        "runtime/commit.py",
        "    gradients.reverse()\n",
        "",
        "unit/runtime/test_commit.py::test_gradients_reach_the_inputs",
    ),
    Mutant(
        "runtime/commit.py",
        "    if torch.is_grad_enabled():  # create_graph=True\n",
        "    if False:\n",
        "unit/runtime/test_commit.py::test_it_runs_once_and_cannot_be_differentiated",
    ),
    Mutant(
        "_torch/autograd.py",
        "bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)",
        "bool(leaf._backward_hooks)",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
    ),
    Mutant(
        "runtime/commit.py",
        "                gradient.copy_(value)",
        "                pass",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
    ),
    Mutant(
        "runtime/commit.py",
        "            leaf.grad = gradient\n",
        "",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
    ),
    Mutant(
        "runtime/commit.py",
        "else leaf.grad.clone())",
        "else leaf.grad)",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
    ),
    Mutant(
        "runtime/commit.py",
        "    except BaseException:\n        with torch.no_grad():\n            for leaf",
        "    except AttributeError:\n        with torch.no_grad():\n            for leaf",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
    ),
    Mutant(
        "runtime/commit.py",
        "        with torch.autograd.set_multithreading_enabled(False):\n            yield",
        "        yield",
        "unit/runtime/test_failures.py::test_a_failing_hook_of_a_parameter",
        "on the CPU autograd has no threads of its own; with GPUs the tests that need them see it",
    ),
    Mutant(
        "runtime/run.py",
        "            if self.failure is None:\n                self.failure = error",
        "            self.failure = error",
        "unit/runtime/test_failures.py::test_the_first_of_several_failures_arrives",
    ),
    Mutant(
        "runtime/run.py",
        "        except BaseException as error:\n            with",
        "        except Exception as error:\n            with",
        "unit/runtime/test_failures.py::test_every_kind_of_exception_arrives",
    ),
    Mutant(
        "runtime/run.py",
        "                self.failure = error\n        self._open_all()\n",
        "                self.failure = error\n",
        (
            "unit/runtime/test_failures.py::test_others_stop_before_their_next_action "
            "unit/runtime/test_failures.py::test_the_first_of_several_failures_arrives"
        ),
    ),
    Mutant(
        "runtime/run.py",
        "            return\n        self.link.passed(self, action)",
        "        self.link.passed(self, action)",
        "unit/runtime/test_failures.py::test_others_stop_before_their_next_action",
        "a step that has failed has all its fences open",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "            total = add_gradient(total, gradient)",
        "            total = gradient",
        "behaviour/test_transparency.py::test_steps_equal_the_plain_model",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "            stage_context.seed = mix_seed(self.seed, self.first_micro_batch + i)",
        "            stage_context.seed = mix_seed(self.seed, 0)",
        "unit/rewriting/test_rng.py::test_numbers_hang_neither_on_cut_nor_schedule_nor_recompute",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "stage_context.is_recomputing = True",
        "pass",
        "unit/_torch/test_saved_tensor_hooks.py::test_what_is_recomputed_is_what_was_computed",
    ),
    Mutant(
        "runtime/wiring.py",
        "if stages in senders and j < stages - 1 else ()",
        "if False else ()",
        "unit/runtime/test_wiring.py::test_backward_of_a_stage_waits_for_the_loss_that_alone_uses_what_it_made",
    ),
    Mutant(
        "runtime/run.py",
        "if kind is ActionKind.BACKWARD and one.takes_all:",
        "if False:",
        "unit/runtime/test_stage_replicas.py::test_replicas_go_back_after_the_one_loss_of_all_micro_batches",
    ),
    Mutant(
        "tracing/source_lines.py",
        "isinstance(part, (ast.BoolOp, ast.IfExp, ast.NamedExpr))",
        "isinstance(part, ast.IfExp)",
        "unit/tracing/test_guards.py::test_a_method_with_an_answer_after_which_forward_may_go_on_is_kept_whole",
    ),
    Mutant(
        "tracing/forward_rng.py",
        "if next(self.draws_from_stream, is_one) and is_one:",
        "if is_one:",
        "unit/tracing/test_guards.py::test_drawn_values_that_are_checked_are_drawn_as_the_model_draws_them",
    ),
    Mutant(
        "runtime/loss_stage.py",
        "_go_back(loss, begin, [rows[k][0][place] for k, place in places], i)",
        "_go_back(loss, begin, [rows[0][0][place] for k, place in places], i)",
        "behaviour/test_joint_tail.py::test_a_loss_of_all_samples",
    ),
    Mutant(
        "utils/output_combination.py",
        "if one.requires_grad and not one.is_affine)",
        "if one.requires_grad and one.is_joint)",
        "behaviour/test_joint_tail.py::test_a_product_of_means_is_one_of_all_samples",
    ),
    Mutant(
        "runtime/run.py",
        "action in self._passed or action.micro_batch < self._ended or",
        "action in self._passed or",
        "unit/runtime/test_wiring.py::test_nobody_waits_for_actions_of_mini_batches_that_have_ended",
    ),
    Mutant(
        "runtime/wiring.py",
        "min((k for k in others if k > user), default=None)",
        "max((k for k in others if k > user), default=None)",
        "unit/runtime/test_wiring.py::test_a_gradient_comes_from_the_next_later_user_and_is_waited_for",
    ),
    Mutant(
        "runtime/wiring.py",
        "max((k for k in others if k < user), default=value.source)",
        "value.source",
        "behaviour/test_transparency.py::test_every_schedule_equals_the_plain_model",
    ),
    Mutant(
        "runtime/wiring.py",
        "        senders |= {link.later for link in links[j] if link.later is not None}\n",
        "",
        "unit/runtime/test_wiring.py::test_a_gradient_comes_from_the_next_later_user_and_is_waited_for",
    ),
    Mutant(
        "runtime/run.py",
        "        self._passed.add(action)\n",
        "",
        "unit/runtime/test_wiring.py::test_backward_of_a_stage_waits_for_the_loss_that_alone_uses_what_it_made",
    ),
    Mutant(
        "runtime/run.py",
        "needed = [Action(*fence, i) for fence",
        "needed = [Action(*fence, 0) for fence",
        "unit/runtime/test_wiring.py::test_backward_of_a_stage_waits_for_the_loss_that_alone_uses_what_it_made",
    ),
    Mutant(
        "runtime/run.py",
        "        for event in list(self._events.values()):\n            event.set()\n",
        "",
        "unit/runtime/test_wiring.py::test_who_waits_goes_on_when_it_opens",
    ),
    Mutant(
        "runtime/exchange.py",
        "add_gradient(self._gradients.get(key), gradient)",
        "gradient",
        "behaviour/test_transparency.py::test_the_gradients_of_what_is_returned_twice_add_up",
    ),
    Mutant(
        "runtime/exchange.py",
        "torch.zeros_like(p) if g is None else g",
        "torch.zeros_like(p) if g is not None else p",
        "behaviour/test_transparency.py::test_inputs_that_require_grad_get_theirs",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "x if name in stage.changed_at_end else x.clone()",
        "x",
        "unit/_torch/test_saved_tensor_hooks.py::test_what_is_recomputed_is_what_was_computed",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "                self._counts[name] = count + 1\n",
        "",
        "unit/runtime/test_executors.py unit/runtime/test_commit.py",
        "sums are then never added to in place: slower, and the same bits",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "        self._statistics[i] = ran.statistics\n",
        "        self._statistics[0] = ran.statistics\n",
        "unit/rewriting/test_deferred_batch_norm.py::test_the_running_statistics_are_those_of_the_mini_batch",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "not known[1].holds()",
        "False",
        "attacks/test_changing_losses.py::test_a_loss_that_changes_is_right_or_refused",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "(loss - loss == 0) & (loss != 0)",
        "loss.isfinite()",
        "attacks/test_changing_losses.py::test_a_loss_that_changes_is_right_or_refused",
    ),
    Mutant(
        "optim.py",
        "_step_copies(optimizer, parts[::-1], is_sparse)",
        "together",
        "attacks/test_coupled_optimizers.py::test_an_optimizer_that_couples_parameters_is_right_or_refused",
    ),
    Mutant(
        "runtime/commit.py",
        "torch.no_grad(), ctx.running():\n            finish, ctx.finish = ctx.finish, None",
        "torch.no_grad():\n            finish, ctx.finish = ctx.finish, None\n            ctx.running().__enter__()",
        "attacks/test_kept_failures.py::test_a_backward_that_was_refused_can_be_called_again",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "            if version != expected:\n",
        "            if False:\n",
        "attacks/test_changed_weights.py",
    ),
    Mutant(
        "_torch/autograd.py",
        'if node is None and getattr(edge.node, "variable", None) is not tensor:',
        "if False:",
        "unit/_torch/test_autograd.py",
    ),
    Mutant(
        "tracing/record/record_model.py",
        "                elif recorder.hides_sequences:",
        "                elif False:",
        "behaviour/test_whole.py::test_a_tuple_that_forward_reads_keeps_its_length",
    ),
    Mutant(
        "tracing/model_state.py",
        "            if type(alone) is type(value) and alone == value:",
        "            if True:",
        "behaviour/test_lazy_state.py::test_a_cached_property_of_what_forward_sets_is_not_left_from_planning",
    ),
    Mutant(
        "tracing/strategies.py",
        "        is_right = is_right and not samples_meet(whole, leaves, error.sizes)\n",
        "",
        "behaviour/test_rows_per_sample.py::test_what_a_loop_makes_of_all_samples_decides_in_no_micro_batch",
    ),
    Mutant(
        "distributed/rank_stream.py",
        'reduction = "batch" if losses.takes_all else self._loss.reduction',
        "reduction = self._loss.reduction",
        "behaviour/test_over_ranks_joint_losses.py::test_a_stream_of_joint_losses_is_that_of_all_samples",
    ),
    Mutant(
        "tracing/verify/owners.py",
        "(-1e4, 1e2), (1e4, 1e2))",
        "(-1.0, 0.1))",
        "behaviour/test_rows_per_sample.py::test_samples_that_may_meet_after_a_loop_are_refused",
    ),
    Mutant(
        "tracing/verify/owners.py",
        "(None, False, True)",
        "(None,)",
        "behaviour/test_rows_per_sample.py::test_what_all_lengths_decide_after_a_loop_is_refused",
    ),
    Mutant(
        "tracing/verify/owners.py",
        "        for together in [shared, *([n] for n in shared)] if shared else []:",
        "        for together in ():",
        "behaviour/test_rows_per_sample.py::test_what_all_lengths_decide_after_a_loop_is_refused",
    ),
    Mutant(
        "tracing/verify/sample_rows.py",
        "intersection(dependencies_of(node)) - findings.shown",
        "intersection(())",
        "behaviour/test_unequal_outputs.py::test_an_example_without_selected_rows_shows_nothing",
    ),
    Mutant(
        "tracing/record/joined_pieces.py",
        "is_all = [*split.users] == [chain[0] for chain in chains]",
        "is_all = True",
        "behaviour/test_unequal_outputs.py::test_selected_rows_that_act_on_each_other_are_refused",
    ),
    Mutant(
        "tracing/record/joined_pieces.py",
        "return bool(rows == total)",
        "return True",
        "behaviour/test_unequal_outputs.py::test_pieces_whose_numbers_are_not_those_of_the_rows_are_an_error_as_in_the_model",
    ),
    Mutant(
        "pipe/programs.py",
        "(of_lists and len({*samples}) > 1)",
        "False",
        "behaviour/test_rows_per_sample.py::test_rows_of_the_only_entry_of_a_list_are_samples_if_in_dims_says_so",
    ),
    Mutant(
        "tracing/verify/sample_rows.py",
        "for place, node in shared.items() if runs[0][place].shape == runs[-1][place].shape",
        "for place, node in shared.items()",
        "behaviour/test_rows_per_sample.py::test_positions_of_tokens_are_whole_if_their_number_divides_by_the_samples",
    ),
    Mutant(
        "tracing/record/opaque_call.py",
        "    def call(replica: nn.Module, a: tuple[Any, ...], k: dict[str, Any]) -> Any:\n"
        "        return getattr(replica, method)(*a, **k) if",
        "    own = getattr(type(module), method)\n\n"
        "    def call(replica: nn.Module, a: tuple[Any, ...], k: dict[str, Any]) -> Any:\n"
        "        return own(replica, *a, **k) if",
        "behaviour/test_whole.py::test_a_method_that_changes_later_is_the_one_that_runs",
    ),
    Mutant(
        "tracing/strategies.py",
        "    if not modules and whole and not options.reads_sequences:",
        "    if False:",
        "behaviour/test_whole.py::test_a_tuple_that_forward_reads_keeps_its_length",
    ),
    Mutant(
        "tracing/shapes/symbolic_shapes.py",
        "is_data_dependent |= isinstance(value, torch.SymInt) and bool(unbacked_sizes(first_expression(value)))",
        "pass",
        "behaviour/test_packing.py::test_each_call_is_a_node_for_all_lengths",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "if size == sum(part.shape[dim] for part in parts))",
        ")",
        "behaviour/test_joint_tail.py::test_steps_are_those_of_the_plain_model_on_the_whole_batch",
    ),
    Mutant(
        "tracing/strategies.py",
        "    except MakesState:  # with `may_overwrite`, it may be no state\n        raise\n",
        "",
        "behaviour/test_rows_per_sample.py::test_a_loop_over_samples_has_a_graph_for_each_size_of_micro_batches",
    ),
    Mutant(
        "pipe/verification.py",
        "if not _are_counts(tensor)]",
        "]",
        "behaviour/test_verify.py::test_counts_stay_whole_numbers",
    ),
    Mutant(
        "pipe/verification.py",
        "return number if next(self.decides, True) else result",
        "return number",
        "behaviour/test_verify.py::test_layers_that_are_left_out_by_chance_are_left_out_of_the_plain_model_too",
    ),
    Mutant(
        "tracing/guards.py",
        "wanted |= _dependencies_of_read(draw) if wanted else wanted",
        "pass",
        "behaviour/test_verify.py::test_layers_that_are_left_out_by_chance_are_left_out_of_the_plain_model_too",
    ),
    Mutant(
        "pipe/verification.py",
        "is_same &= same_python_rng_state(",
        "is_same &= True or same_python_rng_state(",
        "behaviour/test_whole.py::test_a_method_of_a_large_module_is_kept_whole_in_its_place",
    ),
    Mutant(
        "tracing/record/patches.py",
        "return NotKept(full_name, error=recorder.refuse_use) if is_number else value",
        "return value",
        "behaviour/test_overwritten_attributes.py::test_a_counter_that_forward_does_not_use_is_not_kept",
    ),
    Mutant(
        "tracing/record/opaque_call.py",
        "for t, slot in places], values):",
        "for t, slot in places], [t.detach() for t in values]):",
        "behaviour/test_whole.py::test_functions_of_vmap_have_the_tensors_of_the_micro_batch_in_their_closures",
    ),
    Mutant(
        "tracing/record/opaque_call.py",
        "(own, plain), {}, [*own, *shared])",
        "(own, plain), {}, own)",
        "attacks/test_tensor_hooks.py",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "_HookRefusal() if torch.is_grad_enabled() else contextlib.nullcontext():",
        "contextlib.nullcontext():",
        "attacks/test_tensor_hooks.py::test_a_hook_that_only_a_later_step_puts_in_lines_of_several_nodes_is_refused",
    ),
    Mutant(
        "pipe/programs.py",
        "count = 1 if bound.moving_buffers and not in_one else self.settings.micro_batches(batch)",
        "count = self.settings.micro_batches(batch)",
        "attacks/test_moving_buffers.py",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "    if math.inf in values:\n        return False\n",
        "",
        "unit/runtime/test_losses.py::test_a_micro_batch_of_no_elements_that_counts_is_wrong",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "1e-5 if exact else 3e-2",
        "0.3 if exact else 3e-2",
        "unit/runtime/test_losses.py::test_a_difference_of_a_thousandth_is_one",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "1e-5 if exact else 3e-2",
        "1e-5 if exact else 0.3",
        "unit/runtime/test_losses.py::test_half_precision_has_fewer_digits",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "return gradient / count if count else math.inf",
        "return gradient * count if count else math.inf",
        "unit/runtime/test_losses.py::test_elements_that_count_the_same_are_right",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "todo.extend(reversed(node.next_functions))",
        "todo.extend(node.next_functions)",
        "unit/runtime/test_losses.py::test_the_head_of_a_graph",
    ),
    Mutant(
        "runtime/loss_checks.py",
        "    if reduction == TORCH_SUM or name",
        "    if reduction == TORCH_MEAN or name",
        "unit/runtime/test_losses.py::test_the_head_of_a_loss",
    ),
    Mutant(
        "runtime/losses.py",
        'else self.shares[i] if self.reduction == "mean" else 1',
        "else self.shares[i]",
        "unit/runtime/test_losses.py::test_a_sum_over_samples",
    ),
    Mutant(
        "runtime/losses.py",
        "        self.values[i], self.weights[i] = loss.detach(), weight",
        "        self.values[i], self.weights[i] = loss, weight",
        "unit/runtime/test_losses.py::test_a_sum_over_samples",
    ),
    Mutant(
        "utils/batch_split.py",
        "[least + 1] * larger + [least] * (count - larger)",
        "[least] * (count - larger) + [least + 1] * larger",
        "unit/runtime/test_microbatches.py::test_sizes_are_those_of_the_parts_and_the_larger_ones_come_first",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "        return [gradient * weight for weight in weights]",
        "        return [gradient for weight in weights]",
        "unit/runtime/test_microbatches.py::test_the_gradient_of_what_is_put_together_is_that_of_its_parts",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "[part.contiguous() for part in parts] if leaf.is_contiguous() else parts",
        "parts",
        "unit/runtime/test_microbatches.py::test_parts_are_as_dense_as_the_whole",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "((n - 1) / (total - 1)).to(device), (n / (total - 1))",
        "(n / total).to(device), (n / (total - 1))",
        "unit/rewriting/test_deferred_batch_norm.py::test_the_running_statistics_are_those_of_the_mini_batch",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "between * (means - mean) ** 2",
        "between * (means - mean)",
        "unit/rewriting/test_deferred_batch_norm.py::test_the_running_statistics_are_those_of_the_mini_batch",
    ),
    Mutant(
        "runtime/executors.py",
        "                if run.failure is not None:\n                    break\n                run.perform(action)",
        "                run.perform(action)",
        "unit/runtime/test_failures.py::test_others_stop_before_their_next_action",
    ),
    Mutant(
        "runtime/executors.py",
        "                run.fail(error)\n                self._wait_until_idle(queues, threads)\n",
        "                run.fail(error)\n",
        "unit/runtime/test_executors.py::test_an_interrupt_of_the_caller",
    ),
    Mutant(
        "runtime/executors.py",
        'if cause else "it was told to end, by no code of fxpipe"',
        'if True else ""',
        "unit/runtime/test_executors.py::test_a_worker_that_other_code_has_ended_is_said_to_be",
    ),
    Mutant(
        "runtime/executors.py",
        "                raise  # also where",
        "                run.raise_failure()  # also where",
        "unit/runtime/test_executors.py::test_an_interrupt_of_the_caller",
    ),
    Mutant(
        "runtime/executors.py",
        "            torch.set_num_threads(own)\n",
        "            pass\n",
        "unit/runtime/test_executors.py::test_each_worker_has_its_share_of_the_cores",
    ),
    Mutant(
        "runtime/engine.py",
        (
            "                self._runner, self._caller_context = None, CallerContext()\n                "
            "self._busy.release()"
        ),
        "                self._runner, self._caller_context = None, CallerContext()",
        "unit/runtime/test_lifecycle.py::test_a_call_inside_a_step",
    ),
    Mutant(
        "_torch/thread_state.py",
        "            torch.set_autocast_cache_enabled(False)\n",
        "",
        "unit/_torch/test_thread_state.py::test_the_cache_of_casts_is_off_where_autocast_is_set_for_a_thread",
    ),
    Mutant(
        "_torch/thread_state.py",
        "torch.is_grad_enabled() and not torch.is_inference_mode_enabled()",
        "torch.is_grad_enabled()",
        "unit/_torch/test_thread_state.py::test_nothing_in_inference_mode_records_gradients",
    ),
)

SCHEDULING = (
    Mutant(
        "scheduling/builtin.py",
        "hops=n - 1 - j) for j",
        "hops=n - j) for j",
        "unit/scheduling/test_registry.py::test_zero_bubble_keeps_what_the_first_stage_of_1f1b_keeps",
    ),
    Mutant(
        "scheduling/builtin.py",
        "for a in reversed(row))",
        "for a in row)",
        "unit/scheduling/test_schedules.py::test_gpipe_is_all_forwards_then_all_backwards",
    ),
    Mutant(
        "scheduling/builtin.py",
        "more=max(0, min(n - 1, m - n))",
        "more=max(0, m - n)",
        "unit/scheduling/test_registry.py",
        "no stage takes in more than n - 1 - j, nor lags more than j behind, which is less",
    ),
    Mutant(
        "scheduling/builtin.py",
        "lag=j + min(j, more)",
        "lag=j",
        "unit/scheduling/test_registry.py::test_zero_bubble_2p_takes_in_more",
    ),
    Mutant(
        "scheduling/builtin.py",
        "weight[max(0, len(weight) - (lag or 0)) :]",
        "weight[max(0, len(weight) - (lag or 0)) : -1]",
        "unit/scheduling/test_registry.py::test_zero_bubble_lags_behind_with_w_the_more_the_later_the_stage",
    ),
    Mutant(
        "scheduling/builtin.py",
        "hops=2 * (p - 1 - d))",
        "hops=p - 1 - d)",
        "unit/scheduling/test_registry.py::test_interleaved_1f1b_goes_round_in_groups",
    ),
    Mutant(
        "scheduling/builtin.py",
        "for j in reversed(stages) for i in group]",
        "for j in stages for i in group]",
        "unit/scheduling/test_registry.py::test_interleaved_1f1b_goes_round_in_groups",
    ),
    Mutant(
        "scheduling/builtin.py",
        "size * k + min(k, larger)",
        "size * k + min(k, 1)",
        "unit/scheduling/test_registry.py::test_interleaved_1f1b_goes_round_in_groups",
    ),
    Mutant(
        "scheduling/builtin.py",
        "hops=p - 1 - d, lag=d)",
        "hops=p - 1 - d, lag=0)",
        "unit/scheduling/test_registry.py::test_interleaved_zero_bubble_idles_a_third_of_interleaved_1f1b",
    ),
    Mutant(
        "scheduling/v_schedules.py",
        "if max(self._kept[free:slot]) == self._most:",
        "if self._kept[free] == self._most:",
        "unit/scheduling/test_registry.py::test_v_half_and_v_min_keep_a_half_and_a_third_of_what_zbv_keeps",
    ),
    Mutant(
        "scheduling/v_schedules.py",
        "        own.move_up(action, after)\n",
        "",
        "unit/scheduling/test_registry.py::test_v_half_and_v_min_idle_longer_the_less_they_keep",
    ),
    Mutant(
        "scheduling/v_schedules.py",
        'do("I= I-", half)',
        'do("B= B-", half)',
        "unit/scheduling/test_registry.py::test_dualpipev_idles_as_long_as_zbv",
    ),
    Mutant(
        "scheduling/v_schedules.py",
        'do("F= B= W=", p - d)',
        'do("F= B= W=", p - d - 1)',
        "unit/scheduling/test_registry.py::test_zbv_goes_there_and_back",
    ),
    Mutant(
        "scheduling/v_schedules.py",
        "    if m <= p:",
        "    if m < p:",
        "unit/scheduling/test_registry.py::test_zbv_idles_a_sixth_of_1f1b",
    ),
    Mutant(
        "scheduling/validation.py",
        "        last = ActionKind.WEIGHT if (j, i) in split else ActionKind.BACKWARD",
        "        last = ActionKind.BACKWARD",
        "unit/scheduling/test_activations_in_flight.py::test_they_are_the_largest_set_that_is_there",
    ),
    Mutant(
        "scheduling/validation.py",
        "ActionKind.RECOMPUTE if (j, i) in recomputed else ActionKind.FORWARD",
        "ActionKind.FORWARD",
        "unit/scheduling/test_activations_in_flight.py::test_they_are_the_largest_set_that_is_there",
    ),
    Mutant(
        "scheduling/validation.py",
        "return _most_between(schedule, frozenset()) if trains else (1,) * schedule.stages",
        "return _most_between(schedule, frozenset())",
        "unit/scheduling/test_activations_in_flight.py::test_where_nothing_goes_back_one_is_there",
    ),
    Mutant(
        "scheduling/validation.py",
        "place_of.get(needed, -1) > place",
        "place_of.get(needed, -1) > place + 1",
        "unit/scheduling/test_schedules.py::test_illegal_row_is_shown_with_its_fault",
    ),
    Mutant(
        "scheduling/validation.py",
        "            if user != d:\n",
        "            if user > d:\n",
        "unit/scheduling/test_schedules.py unit/scheduling/test_registry.py",
    ),
    Mutant(
        "scheduling/validation.py",
        "                moving.append(row_of.get((action.stage, action.micro_batch + 1), d))",
        "                pass",
        "unit/scheduling/test_replica_rows.py::test_buffers_are_handed_on_in_every_schedule_by_name",
    ),
    Mutant(
        "scheduling/replicas.py",
        "        ahead.append(1 + -(-in_flight // count))",
        "        ahead.append(1 + in_flight // count)",
        (
            "unit/scheduling/test_replica_rows.py"
            "::test_a_stage_that_takes_as_many_times_as_long_keeps_up_with_so_many_replicas"
        ),
    ),
    Mutant(
        "runtime/run.py",
        "if i and kind is ActionKind.FORWARD and j in in_order else ()",
        "if i and kind is ActionKind.RECOMPUTE and j in in_order else ()",
        "unit/runtime/test_stage_replicas.py::test_whatever_order_the_fences_allow_the_bits_are_the_same",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "every = (totals for of_stage in self.replica_totals for totals in of_stage)",
        "every = (totals for of_stage in self.replica_totals for totals in of_stage[:1])",
        "unit/runtime/test_stage_replicas.py::test_micro_batches_that_are_handed_over_go_round",
    ),
    Mutant(
        "runtime/stage_updates.py",
        "            sharing |= {j}",
        "            sharing -= {j}",
        "unit/runtime/test_stage_replicas.py::test_weights_are_updated_once_all_replicas_have_gone_back",
    ),
    Mutant(
        "scheduling/validation.py",
        "NEIGHBOUR_STEP = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1}",
        "NEIGHBOUR_STEP = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: -1}",
        "unit/scheduling/test_schedules.py",
    ),
    Mutant(
        "scheduling/row_transforms.py",
        '"except_last": m - 1',
        '"except_last": m',
        "unit/scheduling/test_activations_in_flight.py::test_the_last_of_1f1b_is_there_beside_one_that_is_recomputed",
    ),
    Mutant(
        "scheduling/row_transforms.py",
        "i < recomputed[stage] or row",
        "i <= recomputed[stage] or row",
        (
            "unit/scheduling/test_schedules.py::test_recompute_stands_before_the_backward_of_later_stages"
            "_of_its_device_that_keep_what_they_made"
        ),
    ),
    Mutant(
        "scheduling/row_transforms.py",
        "action = max(ready, key",
        "action = min(ready, key",
        "unit/scheduling/test_registry.py::test_of_one_micro_batch_zbv_leaves_all_w_to_the_end",
    ),
    Mutant(
        "scheduling/factory.py",
        "if n % each:",
        "if n < each:",
        "unit/scheduling/test_registry.py::test_stages_where_a_schedule_cannot_have_them_are_refused",
    ),
)

SIMULATION = (
    Mutant(
        "cluster.py",
        "2 * (n - 1) * (self.hop + each / n)",
        "2 * n * (self.hop + each / n)",
        "unit/test_cluster.py::test_a_ring_moves_2_n_minus_1_of_n_of_the_bytes",
    ),
    Mutant(
        "cluster.py",
        " / max(used.values())",
        "",
        "unit/test_cluster.py::test_replicas_that_send_over_one_adapter_at_once_share_it",
    ),
    Mutant(
        "simulation/events.py",
        "        free[device] = end\n",
        "",
        "unit/simulation/test_simulate_schedule.py::test_stages_on_one_device_reduce_one_after_the_other",
    ),
    Mutant(
        "planning/describe_cut.py",
        "handling=MESSAGE_SECONDS, ",
        "",
        "unit/planning/plans/test_plan_packets.py::test_the_tuner_knows_what_a_message_costs",
    ),
    Mutant(
        "planning/describe_cut.py",
        "if receiver not in map(routes.rank, stages)",
        "if False",
        "unit/planning/plans/test_plan_packets.py::test_packets_have_all_that_crosses_a_cut_and_what_of_it_is_relayed",
    ),
    Mutant(
        "simulation/events.py",
        "self._put(free if came is None else max(free, came.arrived), _BEGIN, device)",
        "self._put(free if came is None else came.arrived, _BEGIN, device)",
        "unit/simulation/test_simulate_schedule.py::test_bubble_is_n_minus_1_of_m_plus_n_minus_1",
    ),
    Mutant(
        "simulation/events.py",
        "left = max(span.end, *(self._free[one] for one in taken))",
        "left = span.end",
        "unit/simulation/test_simulate_schedule.py::test_a_link_carries_one_transfer_at_a_time",
    ),
    Mutant(
        "simulation/events.py",
        "if last is None or last.arrived < arrival.arrived:",
        "if last is None or last.arrived > arrival.arrived:",
        "unit/simulation/test_simulate_schedule.py::test_sending_takes_its_time_both_ways",
    ),
    Mutant(
        "simulation/events.py",
        "                arrived = left + way.seconds\n",
        "                arrived = left\n",
        "unit/simulation/test_simulate_schedule.py::test_sending_takes_its_time_both_ways",
    ),
    Mutant(
        "simulation/events.py",
        "start = max([time, *(self._free[way] for way in shared)])",
        "start = max((self._free[way] for way in shared), default=time)",
        (
            "unit/simulation/test_simulate_schedule.py::test_a_device_that_copies_over_a_shared_way_begins_no_sooner"
            "_than_there_is_something_to_copy"
        ),
    ),
    Mutant(
        "simulation/events.py",
        "if kind is ActionKind.BACKWARD and (j, i) in split else",
        "if kind is ActionKind.BACKWARD else",
        "unit/simulation/test_simulate_schedule.py::test_bubble_is_n_minus_1_of_m_plus_n_minus_1",
    ),
    Mutant(
        "simulation/events.py",
        "s.forward if s.recompute is None else s.recompute",
        "s.forward",
        "unit/simulation/test_simulate_schedule.py::test_recompute_seconds_are_their_own",
    ),
    Mutant(
        "simulation/events.py",
        "if device_of[one.source] == device_of[one.target]:",
        "if one.source == one.target:",
        "unit/simulation/test_simulate_schedule.py::test_nothing_is_sent_within_a_device",
    ),
    Mutant(
        "simulation/events.py",
        "{kind: [time + s.action for time, s in zip(times, stages, strict=True)] for kind, times in own.items()}",
        "{kind: [time for time, s in zip(times, stages, strict=True)] for kind, times in own.items()}",
        "unit/planning/plans/test_resized_plans.py::test_each_action_has_it",
    ),
    Mutant(
        "simulation/events.py",
        "        if locked and holder.unlocked > time:",
        "        if False:",
        "unit/simulation/test_host.py::test_a_step_takes_the_python_of_all_stages_for_each_micro_batch",
    ),
    Mutant(
        "simulation/events.py",
        "interpreter = 0 if self.one_interpreter else device",
        "interpreter = 0",
        "unit/simulation/test_host.py::test_with_a_process_for_each_device_only_its_own_python_counts",
    ),
    Mutant(
        "simulation/events.py",
        "return cost.action, cost.backward - (cost.weight if is_split else 0.0)",
        "return cost.action + cost.backward, 0.0",
        "unit/simulation/test_host.py::test_backward_is_queued_by_several_threads_at_once",
    ),
    Mutant(
        "simulation/events.py",
        "job.end if job.runs_ahead else job.unlocked",
        "end",
        "unit/simulation/test_host.py::test_workers_on_cpus_wait_for_each_other_where_all_is_python",
    ),
    Mutant(
        "simulation/simulation_result.py",
        "            point = _host_legs(legs, begun, one.job, one.job.start)\n",
        "            point = (device, place - 1, False)\n",
        "unit/simulation/test_host.py::test_no_step_is_shorter_than_the_host_or_the_devices_and_its_critical_path_has_no_gap",
    ),
    Mutant(
        "simulation/timeline.py",
        "max(0.0, 1 - time / seconds) if seconds else 0.0 for",
        "max(0.0, time / seconds) if seconds else 0.0 for",
        "unit/simulation/test_simulate_schedule.py::test_bubble_is_n_minus_1_of_m_plus_n_minus_1",
    ),
    Mutant(
        "simulation/__init__.py",
        "if window.first < t <= window.last:",
        "if window.first <= t <= window.last:",
        "unit/simulation/test_stream_simulation.py::test_equal_stages_take_forward_backward_and_update_for_each_mini_batch",
    ),
    Mutant(
        "scheduling/streams.py",
        "return cls(first, last, last + 1 + others)",
        "return cls(first, last, last + 1)",
        "unit/simulation/test_stream_simulation.py",
    ),
    Mutant(
        "inspect/step_summary.py",
        "step_seconds=run.step_seconds + step.update_seconds",
        "step_seconds=run.step_seconds",
        "unit/simulation/test_stream_simulation.py",
    ),
    Mutant(
        "planning/plans/figures.py",
        "by_device[device] += stage.seconds / len(rows)",
        "by_device[device] += stage.seconds",
        "cli/test_shown_figures.py::test_balance_is_that_of_devices",
    ),
    Mutant(
        "planning/plans/data.py",
        "tuple(range(ends[k], ends[k + 1]))",
        "(ends[k],)",
        "cli/test_shown_figures.py::test_the_report_has_the_stages_of_devices_whose_replicas_take_turns",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        "names = None if self.hardware is None else",
        "names = None if True else",
        "cli/test_shown_figures.py::test_estimates_are_of_that_hardware_alone",
    ),
    Mutant(
        "partitioning/pipedream.py",
        "while most > 0 and (better := within(math.nextafter(most, 0.0))) is not None:",
        "while most > 0 and (better := within(most / 2)) is not None:",
        "unit/partitioning/test_pipedream_partition.py",
    ),
    Mutant(
        "utils/progress.py",
        "bar.refresh()",
        "pass",
        "unit/utils/test_progress.py::test_a_pass_that_takes_long_is_named_while_it_runs",
    ),
    Mutant(
        "planning/tuning/candidates.py",
        "simulate(plan, updates=False)",
        "simulate(plan)",
        "unit/simulation/test_stream_simulation.py::test_the_tuner_compares_a_stream_by_its_mini_batches",
    ),
    Mutant(
        "simulation/simulation_result.py",
        "transfer.bytes * count",
        "transfer.bytes",
        "unit/simulation/test_simulate_schedule.py::test_bytes_of_each_link",
    ),
    Mutant(
        "simulation/simulation_result.py",
        "need <= limit for need, limit in pairs",
        "need < limit for need, limit in pairs",
        "unit/simulation/test_simulated_plans.py::test_what_takes_all_of_its_limit_fits",
    ),
)

PARTITIONING = (
    Mutant(
        "partitioning/block.py",
        "            low = middle + 1\n",
        "            low = middle + 2\n",
        "unit/partitioning/test_block.py::test_of_equal_bottlenecks_that_of_the_fewest_items_is_taken",
    ),
    Mutant(
        "partitioning/block.py",
        "    for _ in range(blocks):\n        stop =",
        "    for _ in range(blocks - 1):\n        stop =",
        "unit/partitioning/test_block.py::test_least_bottleneck_and_bound_on_many_small_rows",
    ),
    Mutant(
        "partitioning/block.py",
        "low, high = max(largest, -(-sums[-1] // blocks)), sums[-1]",
        "low, high = 0, sums[-1]",
        "unit/partitioning/test_block.py",
        "nothing fits into blocks that are smaller, so that the bisection goes on to the same place",
    ),
    Mutant(
        "partitioning/block.py",
        "bisect_right(sums, sums[start] + bottleneck, lo=start) - 1",
        "bisect_left(sums, sums[start] + bottleneck, lo=start) - 1",
        "unit/partitioning/test_block.py::test_of_equal_bottlenecks_that_of_the_fewest_items_is_taken",
    ),
    Mutant(
        "partitioning/block.py",
        "            place -= 1\n",
        "            place -= 0\n",
        "unit/partitioning/test_block.py::test_where_the_bottleneck_leaves_a_choice_cuts_are_next_to_even_shares",
    ),
    Mutant(
        "partitioning/block.py",
        "bisect_left(sums, sums[starts[-1]] - bottleneck)",
        "bisect_right(sums, sums[starts[-1]] - bottleneck)",
        "unit/partitioning/test_block.py::test_where_the_bottleneck_leaves_a_choice_cuts_are_next_to_even_shares",
    ),
    Mutant(
        "partitioning/block.py",
        "[cost * (len(costs) + 1) + 1 for cost in costs]",
        "[cost for cost in costs]",
        "unit/partitioning/test_block.py::test_rows_of_zeros_are_cut_evenly",
    ),
    Mutant(
        "partitioning/block.py",
        "if size[p] <= minimum + largest:",
        "if size[p] <= minimum + 2 * largest:",
        "unit/partitioning/test_block.py::test_least_bottleneck_and_bound_on_many_small_rows",
    ),
    Mutant(
        "partitioning/block.py",
        "            size[q] += moved\n",
        "",
        "unit/partitioning/test_block.py::test_least_bottleneck_and_bound_on_many_small_rows",
    ),
    Mutant(
        "partitioning/block.py",
        "max(first[i], cuts[-1] + 1)",
        "cuts[-1] + 1",
        "unit/partitioning/test_block.py::test_least_bottleneck_and_bound_on_many_small_rows",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        "at = max(divisible,",
        "at = min(divisible,",
        "unit/partitioning/test_block.py::test_cuts_by_hand",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        'path == name or path.startswith(name + ".")',
        "path.startswith(name)",
        "unit/partitioning/test_block.py::test_a_module_is_not_found_by_half_its_name",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        "ends = [(name, places[-1] + 1 if",
        "ends = [(name, places[0] + 1 if",
        "unit/planning/test_manual_cuts.py::test_stages_end_behind_the_names",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        "for place in starts if place in nodes.forbidden_cuts)",
        "for place in starts[:1] if place in nodes.forbidden_cuts)",
        "unit/partitioning/test_block.py::test_a_cut_by_hand_at_a_forbidden_place_refused",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        "if before == place - 1 and",
        "if before < place and",
        "unit/partitioning/test_pins.py::test_two_pins_on_one_device_leave_room_for_another_between_them",
    ),
    Mutant(
        "partitioning/manual_cuts.py",
        "for name in sorted(pins, key=len):",
        "for name in sorted(pins, key=len, reverse=True):",
        "unit/partitioning/test_pins.py::test_pins_bound_the_stages_of_nodes",
    ),
    Mutant(
        "partitioning/partial_recompute.py",
        "return min(candidates, key=self._again, default=None)",
        "return max(candidates, key=self._again, default=None)",
        "unit/partitioning/test_partial_recompute.py::test_a_stage_recomputes_no_more_than_its_memory_asks_for",
    ),
    Mutant(
        "partitioning/chain.py",
        "if held.maker >= 0 and held.savers[-1] > held.maker:",
        "if held.maker >= 0 and held.savers[0] > held.maker:",
        "unit/partitioning/test_optimal.py::test_loads_are_what_they_are_defined_to_be",
    ),
)

REWRITING = (
    Mutant(
        "rewriting/cut_points.py",
        "last = max(remaining, key",
        "last = min(remaining, key",
        "unit/rewriting/test_aliasing.py::test_a_view_is_made_from_the_nearest_that_is_there_and_not_from_the_first",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "return remaining.pop(), again[::-1]",
        "return remaining.pop(), again",
        "unit/rewriting/test_aliasing.py::test_several_are_made_from_what_they_have_in_common_each_after_its_source",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "            if last not in self.source:\n                return None\n",
        "            if last not in self.source:\n                break\n",
        "unit/rewriting/test_aliasing.py::test_what_may_be_a_copy_is_made_from_nothing",
    ),
    Mutant(
        "rewriting/cut_points.py",
        " or any(container_of(user) is not None for n in remaining for user in n.users)",
        "",
        "behaviour/test_inplace.py",
        "what returned a tuple is in the stage of its parts (`cuts`), so that no tuple is alive at a cut",
    ),
    Mutant(
        "rewriting/cut_points.py",
        'if name != "contiguous" else None',
        'if name != "clone" else None',
        "unit/rewriting/test_aliasing.py::test_what_may_be_a_copy_is_made_from_nothing",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "for place in range(max(first, 0) + 1, last + 1):",
        "for place in range(max(first, 0) + 1, last):",
        "unit/rewriting/test_build_stages.py::test_parts_stay_with_what_returned_them",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "crossing and first < last_write and",
        "crossing and first <= last_write and",
        "behaviour/test_inplace.py unit/rewriting/test_build_stages.py",
        "where they are the same the span ends where it begins, and forbids nothing",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "if effects.last[n] > first]",
        "if effects.last[n] >= first]",
        "unit/rewriting/test_aliasing.py::test_what_is_used_for_the_last_time_before_a_cut_does_not_forbid_it",
    ),
    Mutant(
        "rewriting/build_stages.py",
        "if PIPE_INPUT < source < target - 1",
        "if PIPE_INPUT < source < target",
        "unit/rewriting/test_build_stages.py::test_stage_code_reads_like_the_model",
    ),
    Mutant(
        "rewriting/build_stages.py",
        "for t in range(user - 1, maker, -1) if",
        "for t in range(maker + 1, user) if",
        "behaviour/test_inplace.py::test_cut_anywhere_it_is_the_plain_model",
    ),
    Mutant(
        "rewriting/build_stages.py",
        "self.is_received(node, stage) and stage <= self._stage_at(self.effects.last[node])",
        "self.is_received(node, stage)",
        "behaviour/test_inplace.py::test_cut_anywhere_it_is_the_plain_model",
    ),
    Mutant(
        "rewriting/build_stages.py",
        (
            "        self._set_state(self.cut.traced.state)  # a copy made in a `no_grad` "
            "block would lose its gradient\n"
        ),
        "",
        "unit/rewriting/test_build_stages.py::test_a_stage_sets_the_state_of_its_nodes_and_restores_the_callers",
    ),
    Mutant(
        "utils/accelerator.py",
        "        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK",
        "        state = number + 0x9E3779B97F4A7C15 & _MASK",
        "unit/rewriting/test_rng.py::test_numbers_depend_on_seed_and_ordinal",
    ),
    Mutant(
        "rewriting/rng.py",
        "            process.set_state(before)\n",
        "",
        "unit/rewriting/test_rng.py::test_a_random_node_draws_what_torch_draws_bit_for_bit",
    ),
    Mutant(
        "rewriting/split_backward.py",
        "version_of(kept) != version:",
        "version_of(kept) < version:",
        "unit/rewriting/test_split_backward.py::test_an_input_changed_in_place_is_refused",
    ),
    Mutant(
        "rewriting/split_backward.py",
        "wants = wants_w, wants_b = w.requires_grad, b is not None and b.requires_grad",
        "wants = wants_w, wants_b = w.requires_grad, b is not None",
        "unit/rewriting/test_split_backward.py::test_products",
    ),
    Mutant(
        "rewriting/split_backward.py",
        "x.transpose(1, 2).conj().bmm(gradient), None",
        "x.transpose(1, 2).bmm(gradient), None",
        "unit/rewriting/test_split_backward.py::test_products",
    ),
    Mutant(
        "rewriting/deferred_batch_norm.py",
        "x.numel() // max(x.size(1), 1)",
        "x.size(0)",
        "unit/rewriting/test_deferred_batch_norm.py::test_the_running_statistics_are_those_of_the_mini_batch",
    ),
)

TRACING = (
    Mutant(
        "tracing/guards.py",
        (
            "        except Exception:  # not for these inputs; should they be wrong ones, "
            "the model will say so itself\n"
            "            return False"
        ),
        "        except Exception:\n            return True",
        "unit/tracing/test_guards.py::test_a_guard_that_cannot_be_asked_does_not_hold",
    ),
    Mutant(
        "tracing/guards.py",
        "        if node in needed or not storages.isdisjoint(_written_storages(node)):",
        "        if node in needed:",
        "unit/tracing/test_guards.py::test_reads_of_inputs",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "        changed |= {key for key, old in before.items() if not equal_tensors(buffers[key][1], old)}\n",
        "",
        "unit/tracing/verify/test_effects.py::test_a_write_that_no_version_shows",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "            changed |= {storages.name(values[b]) for b in running_statistics(node)}\n",
        "            pass\n",
        "unit/rewriting/test_deferred_batch_norm.py::test_every_momentum",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "if version_of(t) != v}",
        "if version_of(t) > v + 1}",
        "behaviour/test_inplace.py::test_cut_anywhere_it_is_the_plain_model",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "last |= {o: len(nodes) for o",
        "last |= {o: len(nodes) - 1 for o",
        "unit/tracing/verify/test_effects.py::test_what_is_returned_is_alive_behind_the_last_node",
    ),
    Mutant(
        "utils/python_objects.py",
        " or ((left != left) is True and (right != right) is True):",
        ":",
        "unit/utils/test_equality.py::test_answers_are_of_one_kind_and_nan_is_itself",
    ),
    Mutant(
        "utils/python_objects.py",
        " and repr(left) == repr(right)",
        "",
        "attacks/test_inputs.py::test_minus_zero_is_another_number",
    ),
    Mutant(
        "tracing/record/recorded_sizes.py",
        "return bool(self.question(leaves) == self.answer)",
        "return True",
        "attacks/test_inputs.py::test_each_layout_has_its_graph",
    ),
    Mutant(
        "pipe/model_calls.py",
        "if version_of(tensor) != version:",
        "if version_of(tensor) < version:",
        "attacks/test_reused_tensors.py::test_micro_batches_that_are_filled_again_are_refused",
    ),
    Mutant(
        "tracing/record/recorder.py",
        "if seed != self.seed_of_generator or start in self._draw_starts:",
        "if start in self._draw_starts:",
        "attacks/test_seeded_forward.py::test_a_forward_that_seeds_is_refused_with_its_line",
    ),
    Mutant(
        "utils/python_objects.py",
        "type(left) is not type(right) or ",
        "",
        "unit/utils/test_equality.py::test_answers_are_of_one_kind_and_nan_is_itself",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "                own[place] = own[place].clone()",
        "                pass",
        (
            "behaviour/test_continuation.py::test_a_buffer_that_some_step_writes_to_between_the_blocks"
            "_is_an_error_of_that_step_and_stays"
        ),
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "if version_of(now) != v or not equal_tensors(now, old)]",
        "if version_of(now) < v]",
        (
            "behaviour/test_continuation.py::test_a_buffer_that_some_step_writes_to_between_the_blocks"
            "_is_an_error_of_that_step_and_stays"
        ),
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "                buffers[name].copy_(before[name][1])",
        "                pass",
        (
            "behaviour/test_continuation.py::test_a_buffer_that_some_step_writes_to_between_the_blocks"
            "_is_an_error_of_that_step_and_stays"
        ),
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "if end is not None and any(version_of(tensor)",
        "if end is None and any(version_of(tensor)",
        "behaviour/test_continuation.py::test_a_forward_that_writes_to_what_it_was_given_stays_in_one_piece",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "zip(slots, tensors, strict=True) if not is_fixed(tensor)}",
        'zip(slots, tensors, strict=True) if slot.kind != "parameter"}',
        "behaviour/test_continuation.py::test_an_encoder_of_keys_follows_and_its_queue_moves_on",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "StageTotals(inputs.is_handed_over)",
        "StageTotals()",
        "behaviour/test_continuation.py::test_a_teacher_follows_its_student_once_in_a_mini_batch",
    ),
    Mutant(
        "runtime/stage_instance.py",
        "() if self.is_handed_over else stage.repeated",
        "()",
        "behaviour/test_continuation.py::test_a_teacher_follows_its_student_once_in_a_mini_batch",
    ),
    Mutant(
        "tracing/strategies.py",
        "        refuse_remembered_samples(traced)\n",
        "        pass\n",
        "behaviour/test_continuation.py::test_a_teacher_follows_its_student_once_in_a_mini_batch",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "followers | counters if differing.isdisjoint(writers[n])}",
        "followers | counters}",
        "behaviour/test_continuation.py::test_a_teacher_follows_its_student_once_in_a_mini_batch",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "if not parameters.isdisjoint(str(source.target) for source in sources[n])}",
        "if str(n.target) in parameters}",
        "behaviour/test_continuation.py::test_the_vectors_of_spectral_norm_change_once_in_a_mini_batch",
    ),
    Mutant(
        "tracing/record/opaque_call.py",
        "storage_of(tensor) in opaque.written or not (",
        "not (",
        "behaviour/test_continuation.py::test_an_encoder_of_keys_follows_and_its_queue_moves_on",
    ),
    Mutant(
        "tracing/record/opaque_call.py",
        "        memory.copy_(after)\n    if not is_same:",
        "        memory.copy_(memory)\n    if not is_same:",
        "behaviour/test_continuation.py::test_an_encoder_of_keys_follows_and_its_queue_moves_on",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "        with set_thread_state(segment.end.state):\n",
        "        if True:\n",
        "behaviour/test_continuation.py::test_a_module_that_is_called_without_gradients_is_recorded_without_gradients",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "self.end is not None and info(node).is_random",
        "self.end is None and info(node).is_random",
        "behaviour/test_continuation.py::test_random_numbers_are_drawn_once",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "if answers or (self._has_run and is_other):",
        "if answers:",
        "behaviour/test_continuation.py::test_calls_that_depend_on_values_are_an_error_of_the_step",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "                self._left_out.discard(name)\n",
        "",
        "behaviour/test_continuation.py::test_a_buffer_that_counts_before_the_blocks_keeps_the_rest_in_one_piece",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        "            outside = [slot for slot in outside if is_fixed(slots[slot])]",
        "            pass",
        "behaviour/test_continuation.py::test_a_forward_that_looks_between_its_blocks_is_cut_between_them",
    ),
    Mutant(
        "tracing/record/patches.py",
        "is_in_node=recorder.paused > 0",
        "is_in_node=False",
        "behaviour/test_overwritten_attributes.py::test_what_the_next_call_or_a_node_reads_is_refused",
    ),
    Mutant(
        "tracing/record/record_model.py",
        "names += [] if is_read else [name]",
        "names += [name]",
        "behaviour/test_overwritten_attributes.py::test_what_the_next_call_or_a_node_reads_is_refused",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "for name in traced.overwritten:",
        "for name in ():",
        "behaviour/test_overwritten_attributes.py::test_what_the_next_call_or_a_node_reads_is_refused",
    ),
    Mutant(
        "runtime/mini_batch.py",
        'if n.rpartition(".")[2] in losses.reads and tensors.has(n)',
        "if not losses.reads",
        "behaviour/test_overwritten_attributes.py::test_a_loss_does_not_read_values_of_before_the_step",
    ),
    Mutant(
        "tracing/shapes/output_dims.py",
        "return (is_scalar or len(parts) == len(users)) and all(map(has_no_sizes, parts))",
        "return True",
        "behaviour/test_joint_tail.py::test_numbers_of_boxes_that_only_python_of_the_tail_reads_need_no_graph",
    ),
    Mutant(
        "tracing/shapes/output_dims.py",
        "if node not in asked and node.users and all(map(runs_python, node.users))",
        "if node.users",
        "behaviour/test_joint_tail.py::test_numbers_of_boxes_that_only_python_of_the_tail_reads_need_no_graph",
    ),
    Mutant(
        "tracing/strategies.py",
        "if first is None or cuts > cut_elements(leaves, first.in_dims):",
        "if first is None:",
        "behaviour/test_joint_tail.py::test_a_list_with_an_entry_for_each_sample_is_whole_and_the_samples_are_cut",
    ),
    Mutant(
        "tracing/record/gradients.py",
        "x.view_as(x) if x.requires_grad else x.detach().requires_grad_()",
        "x.detach().requires_grad_()",
        "behaviour/test_gradients_in_forward.py",
    ),
    Mutant("tracing/record/gradients.py", "    @with_saved_tensors\n", "", "behaviour/test_gradients_in_forward.py"),
    Mutant(
        "tracing/record/gradients.py",
        "isdisjoint(read if n in between else read | inside)",
        "isdisjoint(inside)",
        "behaviour/test_gradients_in_forward.py",
    ),
    Mutant(
        "tracing/record/packing.py",
        "if not all(map(operator.is_, first[2:], sequence[2:])):",
        "if False:",
        "behaviour/test_packing.py",
    ),
    Mutant(
        "tracing/record/packing.py",
        'lengths"].max() if total_length is None',
        'lengths"].max().item() if total_length is None',
        "behaviour/test_packing.py",
    ),
    Mutant(
        "rewriting/rng.py", "bidirectional, False, **packing)", "bidirectional, False)", "behaviour/test_packing.py"
    ),
    Mutant("rewriting/rng_compiled.py", "if n.target in PACKING_NODES", "if False", "behaviour/test_packing.py"),
    Mutant(
        "tracing/shapes/symbolic_shapes.py",
        "(sources and not number.free_symbols) or any(",
        "any(",
        "behaviour/test_trimmed_batches.py",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "not (number.free_symbols or info(node).is_data_dependent)",
        "not number.free_symbols",
        "behaviour/test_trimmed_batches.py",
    ),
    Mutant(
        "tracing/node_info.py",
        "            if info(node).number is None or info(node).is_float_number or info(node).is_data_dependent:\n",
        "            if info(node).number is None:\n",
        "behaviour/test_trimmed_batches.py",
    ),
    Mutant(
        "tracing/shapes/symbolic_run.py",
        "if self.known.fixing or place in candidates]",
        "if place in candidates]",
        "behaviour/test_joint_tail.py::test_a_list_with_an_entry_for_each_sample_is_whole_and_the_samples_are_cut",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "        if outputs[one.output] is None:",
        "        if not outputs:",
        "behaviour/test_joint_tail.py::test_a_second_length_makes_a_graph_for_all_lengths",
    ),
    Mutant(
        "runtime/engine.py",
        "        losses.reads = self.loss_histories.names_read(call.function)",
        "        losses.reads = frozenset()",
        "behaviour/test_overwritten_attributes.py::test_a_loss_of_a_stream_reads_no_older_values",
    ),
    Mutant(
        "tracing/model_state.py",
        "now.__wrapped__ if now.__class__ is NotKept else now",
        "now",
        "unit/runtime/test_bound_program.py::test_losses_in_two_threads_put_back_what_they_hide",
    ),
    Mutant(
        "runtime/bound_program.py",
        "tensor.__wrapped__ if tensor.__class__ is NotKept else tensor",
        "tensor",
        "unit/runtime/test_bound_program.py::test_losses_in_two_threads_put_back_what_they_hide",
    ),
    Mutant(
        "runtime/bound_program.py",
        "zip(places, before, strict=True)",
        "zip(places, before[1:])",
        "behaviour/test_overwritten_attributes.py::test_a_loss_does_not_read_values_of_before_the_step",
    ),
    Mutant(
        "tracing/record/lazy_state.py",
        " and _calls_agree(first_of_others, later_of_others)",
        "",
        "behaviour/test_lazy_state.py::test_what_counts_is_asked_for_a_call_by_hand_and_then_is_right",
    ),
    Mutant(
        "tracing/record/lazy_state.py",
        "    before.restore()\n    if is_once",
        "    if is_once",
        "behaviour/test_lazy_state.py::test_what_counts_is_asked_for_a_call_by_hand_and_then_is_right",
    ),
    Mutant(
        "tracing/record/lazy_state.py",
        " and _calls_agree(first, later)",
        "",
        "behaviour/test_lazy_state.py::test_what_counts_is_asked_for_a_call_by_hand_and_then_is_right",
    ),
    Mutant(
        "tracing/record/lazy_state.py",
        " and not _values_agree(values, others)",
        "",
        "behaviour/test_lazy_state.py::test_samples_that_are_nothing_do_not_tell_what_a_first_call_makes_of_them",
    ),
    Mutant(
        "tracing/record/record_model.py",
        'None if new_spec == spec else "the structure"',
        "None",
        "behaviour/test_written_inputs.py::test_a_container_that_forward_changes_is_refused",
    ),
    Mutant(
        "tracing/record/graph_break.py",
        ", call_checkpoints_through():",
        ":",
        "behaviour/test_continuation.py::test_checkpoints_around_calls_that_are_recorded_are_calls",
    ),
    Mutant(
        "tracing/shapes/output_dims.py",
        "if not is_trained and walk",
        "if walk",
        "behaviour/test_joint_tail.py::test_what_an_input_with_a_gradient_gives_is_refused",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "            every = [*map(_with_head, bounds, given_inputs.leaves, given_inputs.samples)]",
        "            every = [*given_inputs.leaves]",
        "behaviour/test_joint_tail.py::test_micro_batches_of_the_caller_and_mini_batches_of_a_stream_share_their_own",
    ),
    Mutant(
        "runtime/loss_stage.py",
        "if weight != 1 and tensor_requires_grad(value):",
        "if False:",
        "behaviour/test_joint_tail.py::test_a_tail_of_parameters_that_were_frozen_while_planning_is_refused",
    ),
    Mutant(
        "scheduling/streams.py",
        "self._units[-1] + (1 if is_joint else micro_batches)",
        "self._units[-1] + micro_batches",
        "unit/scheduling/test_streams.py::test_rows_of_replicas_run_and_every_forward_finds_its_version",
    ),
    Mutant(
        "scheduling/streams.py",
        "and is_joint and i < last:",
        "and False:",
        "unit/scheduling/test_streams.py::test_rows_of_replicas_run_and_every_forward_finds_its_version",
    ),
    Mutant(
        "pipe/train_stream.py",
        "tuple(map(len, settings.stage_devices)), settings.chunks)",
        "tuple(map(len, settings.stage_devices)))",
        "unit/runtime/test_stream_replicas.py::test_replicas_wait_for_the_loss_of_all_samples",
    ),
    Mutant(
        "simulation/events.py",
        "range(count - 1, schedule.micro_batches, count)",
        "range(0, schedule.micro_batches, count)",
        "behaviour/test_joint_tail.py::test_plans_know_the_tail",
    ),
    Mutant(
        "distributed/rank_stream.py",
        "for i in range(len(losses.shares))]",
        "for i in range(one.micro_batches)]",
        "behaviour/test_over_ranks_joint_losses.py::test_a_stream_of_joint_losses_is_that_of_all_samples",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "            self.joins |= dict.fromkeys(self.failed, NO_JOIN)\n",
        "",
        "behaviour/test_joint_tail.py",
        "the whole's value in each part is neither rows nor a sum, and a claim that it is the same ends in a refusal",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "            is_mean = bool(shape[0].free_symbols)",
        "            is_mean = True",
        "behaviour/test_own_losses.py::test_a_loss_that_adds_up_is_known_as_a_sum",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "runs_python(node) or info(node).is_random or info(node).is_guarded_read",
        "runs_python(node) or info(node).is_guarded_read",
        "behaviour/test_own_losses.py::test_a_count_of_what_is_drawn_is_known_behind_the_draw_alone",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "        if first is not None and share >= MAX_TAIL_SHARE:",
        "        if first is None:",
        "behaviour/test_joint_tail.py::test_a_large_part_of_the_model_is_no_tail",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "                totals.buffers[name] = value\n",
        "",
        "behaviour/test_joint_tail.py::test_state_that_changes_once_in_a_step",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "        if node in self.after_update or is_view:",
        "        if is_view:",
        "behaviour/test_joint_tail.py::test_state_that_changes_once_in_a_step",
    ),
    Mutant(
        "tracing/shapes/output_dims.py",
        "if held[name] in read or not",
        "if not",
        "behaviour/test_joint_tail.py::test_steps_are_those_of_the_plain_model_on_the_whole_batch",
    ),
    Mutant(
        "pipe/programs.py",
        "            if is_part and graph.bound.update is not None:",
        "            if False:",
        "behaviour/test_joint_tail.py::test_state_that_changes_once_in_a_step",
    ),
    Mutant(
        "tracing/shapes/batch_reductions.py",
        "                if piece.node in changed or (is_reader and not changed.isdisjoint(node.all_input_nodes)):",
        "                if False:",
        "behaviour/test_joint_tail.py::test_what_samples_have_in_common_may_not_differ_between_micro_batches",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "        hiding = {n for n in self.blocks - self.opened if self.joins[n] or len(info(n).shapes) > 1}",
        "        hiding = set()",
        "attacks/test_samples_meet.py::test_samples_that_meet_are_refused_with_the_line",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "not all(size.is_polynomial() for size in of_values)",
        "False",
        "behaviour/test_unequal_outputs.py::test_selected_rows_that_are_cut_by_their_number_are_cut_once",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        " or (arguments and of_values):",
        ":",
        "behaviour/test_unequal_outputs.py::test_python_that_decides_by_the_number_of_selected_rows_is_refused",
    ),
    Mutant(
        "tracing/verify/sample_rows.py",
        "not run.is_noisy or run.selected or",
        "not run.is_noisy or",
        "unit/tracing/shapes/test_symbolic_shapes.py::test_rows_that_a_mask_selects_are_rows_of_samples",
    ),
    Mutant(
        "tracing/shapes/symbolic_run.py",
        "            if size.is_number:",
        "            if False:",
        "behaviour/test_unequal_outputs.py::test_rows_that_a_mask_selects_are_rows_of_samples",
    ),
    Mutant(
        "tracing/shapes/symbolic_shapes.py",
        "            is_check=isinstance(read.result, bool) and is_line_of_check(read.where),",
        "            is_check=False,",
        "behaviour/test_unequal_outputs.py::test_rows_that_a_mask_selects_are_rows_of_samples",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "                hiding.add(node)",
        "                pass",
        "attacks/test_samples_meet.py::test_samples_that_meet_are_refused_with_the_line",
    ),
    Mutant(
        "tracing/verify/sample_rows.py",
        ', ("equal", even))):',
        ")):",
        "attacks/test_samples_meet.py::test_samples_that_meet_are_refused_with_the_line",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "self.parameters[node] = compared_sizes.opened(parameter)",
        "self.parameters[node] = parameter",
        "attacks/test_samples_meet.py::test_right_models_stay_accepted",
    ),
    Mutant(
        "tracing/verify/sample_rows.py",
        "asked = {*own, batch, SAMPLES - 1, SAMPLES} - {1}",
        "asked = {*own, batch}",
        "behaviour/test_micro_batch_sizes.py::test_first_samples_are_right_or_refused_at_other_batch_sizes",
    ),
    Mutant(
        "rewriting/cut_points.py",
        "            del self.source[node]",
        "            pass",
        "behaviour/test_inplace.py::test_cut_anywhere_it_is_the_plain_model",
    ),
    Mutant(
        "tracing/record/record_model.py",
        "for name in (*now, *old):",
        "for name in now:",
        "behaviour/test_written_inputs.py::test_a_container_that_forward_changes_is_refused",
    ),
    Mutant(
        "tracing/record/record_model.py",
        "if old[name] is not now[name] if is_tensor else not equal_values(old[name], now[name]):",
        "if False if is_tensor else not equal_values(old[name], now[name]):",
        "behaviour/test_written_inputs.py::test_a_container_that_forward_changes_is_refused",
    ),
    Mutant(
        "tracing/record/record_model.py",
        ':{lines[frame]}"',
        ':{frame.f_lineno}"',
        "behaviour/test_written_inputs.py::test_a_container_that_forward_changes_is_refused",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "            if gradient is other:\n                continue\n",
        "            continue\n",
        "unit/tracing/verify/test_training_equivalence.py::test_a_gradient_that_is_missing_is_none_that_is_zero",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "<= 100 * gradient",
        "<= 1e9 * gradient",
        "unit/tracing/verify/test_training_equivalence.py::test_a_recording_with_a_wrong_backward_is_refused",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "                if not is_roughly_close(w, h):",
        "                if False:",
        "unit/tracing/verify/test_training_equivalence.py::test_what_the_second_call_makes_of_the_state_is_compared",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "(rows.sum(0, dtype=dtype), rows.sum(1, dtype=dtype))",
        "(rows.sum(0, dtype=dtype),)",
        "unit/tracing/verify/test_training_equivalence.py::test_large_gradients_are_compared_by_their_sums",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        "((1, -1) if has_integers else ())",
        "()",
        "attacks/test_samples_meet.py::test_integers_of_an_example_hide_no_order_of_samples",
    ),
    Mutant(
        "tracing/verify/owners.py",
        "if self.owners.keys().isdisjoint((*sources, *sharing)) and",
        "if False and",
        "behaviour/test_rows_per_sample.py::test_a_loop_over_samples_has_a_graph_for_each_size_of_micro_batches",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "if not are_equal(want[0].backward, have[0].backward):",
        "if False:",
        "unit/tracing/verify/test_training_equivalence.py::test_a_recording_with_a_wrong_backward_is_refused",
    ),
    Mutant(
        "tracing/verify/autograd_graph.py",
        "return is_same or torch.equal(one, other)",
        "return True",
        "unit/tracing/verify/test_autograd_graph.py",
    ),
    Mutant(
        "tracing/verify/autograd_graph.py",
        "value.detach().clone() if storage_of(value) in written else value.detach()",
        "value.detach()",
        "unit/tracing/verify/test_autograd_graph.py",
    ),
    Mutant(
        "_torch/autograd.py",
        "or has_hooks or not",
        "or not",
        "unit/tracing/verify/test_training_equivalence.py::test_saved_values_are_read_by_backward_only",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "{name: tensor.detach().clone() for name, tensor in run.buffers.items()}",
        "run.buffers",
        "unit/tracing/verify/test_training_equivalence.py::"
        "test_buffers_are_compared_as_forward_leaves_them_and_as_backward_does",
    ),
    Mutant(
        "_torch/autograd.py",
        "or not _SHOWN_CLASS.fullmatch(kind.__name__)",
        "",
        "unit/tracing/verify/test_autograd_graph.py",
    ),
    Mutant(
        "utils/batch_split.py",
        "return frozenset((batch // parts, -(-batch // parts)))",
        "return frozenset((-(-batch // parts),))",
        "project/test_docstrings.py",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "own[1] < extent[2] and extent[1] < own[2]",
        "own[1] <= extent[2] and extent[1] <= own[2]",
        "behaviour/test_written_inputs.py::test_memory_that_is_given_twice_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "zip(tensor.shape, tensor.stride(), strict=True)) + 1",
        "zip(tensor.shape, tensor.stride(), strict=True))",
        "behaviour/test_written_inputs.py::test_memory_that_is_given_twice_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "differs = alias in classes or str(node.target) in state",
        "differs = False",
        "behaviour/test_written_inputs.py::test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "info(node).is_random or any",
        "any",
        "behaviour/test_written_inputs.py::test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "source in nodes or effects.alias.get(source) in classes for",
        "source in nodes for",
        "behaviour/test_written_inputs.py::test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "classes |= {alias, *(effects.written_classes[place] if place >= 0 else ())} - {None}",
        "classes |= {alias} - {None}",
        "behaviour/test_written_inputs.py::test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused",
    ),
    Mutant(
        "tracing/verify/effects.py",
        "            differs = bool(number.free_symbols)",
        "            differs = False",
        "behaviour/test_written_inputs.py::test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused",
    ),
    Mutant(
        "_torch/autograd_functions.py",
        "return call(plain, function, args, kwargs)",
        "return plain(function, *args, **kwargs)",
        "unit/_torch/test_autograd_functions.py::test_applying_is_as_it_was_after_a_block_and_for_nested_ones",
    ),
    Mutant(
        "_torch/autograd_functions.py",
        "            torch.autograd.Function.apply = own  # type: ignore[method-assign]",
        "            pass",
        "unit/_torch/test_autograd_functions.py::test_applying_is_as_it_was_after_a_block_and_for_nested_ones",
    ),
    Mutant(
        "utils/output_combination.py",
        "return torch.where(count == 0, torch.zeros((), dtype=wide, device=mean.device), mean.to(wide) * count)",
        "return mean.to(wide) * count",
        "behaviour/test_own_losses.py::test_a_models_loss_is_that_of_the_mini_batch",
    ),
    Mutant(
        "utils/output_combination.py",
        "                piece = piece / weight",
        "                pass",
        "behaviour/test_own_losses.py::test_a_models_loss_is_that_of_the_mini_batch",
    ),
    Mutant(
        "planning/passes.py",
        "        torch.no_grad(),\n",
        "",
        "unit/planning/test_evaluation_check.py::test_the_reason_is_the_one_that_evaluation_gives",
    ),
    Mutant(
        "tracing/forward_rng.py",
        "            self._state = generator.get_state()\n",
        "",
        "unit/tracing/test_guards.py::test_layer_drop_decides_once_for_a_step_and_by_chance",
    ),
    Mutant(
        "utils/python_state.py",
        "        if walk.facts == self.facts:\n",
        "        if True:\n",
        "unit/utils/test_state_of_functions.py::test_attributes_that_forward_reads",
    ),
    Mutant(
        "utils/python_state.py",
        "array.shape, array.dtype, array.tobytes()",
        "array.shape, array.dtype",
        "unit/utils/test_state_of_functions.py::test_attributes_that_forward_reads",
    ),
    Mutant(
        "tracing/traced.py",
        "            and self.switches == torch_switches()\n",
        "",
        "attacks/test_python_state.py::test_changes_between_steps_are_followed",
    ),
    Mutant(
        "tracing/record/python_reads.py",
        "            names.add(name)\n",
        "            pass\n",
        "attacks/test_python_state.py::test_changes_between_steps_are_followed",
    ),
    Mutant(
        "tracing/record/record_model.py",
        "    if name := state.changed():\n",
        "    if (name := state.changed()) and False:\n",
        "attacks/test_side_effects.py::test_what_each_forward_changes_is_refused_with_its_line",
    ),
    Mutant(
        "_torch/module_internals.py",
        "[number for number, _ in global_hooks()]",
        "[]",
        "attacks/test_python_state.py::test_global_hooks_put_on_after_planning_are_refused",
    ),
)

PROFILING = (
    Mutant(
        "tracing/verify/side_by_side.py",
        "self.adaptive.update(() if _are_of_samples(*reads) else (node,))",
        "pass",
        "attacks/test_samples_meet.py::test_samples_that_meet_are_refused_with_the_line",
    ),
    Mutant(
        "tracing/shapes/symbolic_run.py",
        "query[:-2] == key[:-2] == value[:-2] and ",
        "",
        "unit/tracing/shapes/test_symbolic_shapes.py::test_sizes_of_products_are_those_of_torch_or_left_to_it",
    ),
    Mutant(
        "tracing/shapes/symbolic_run.py",
        "not (is_asked or is_cast)",
        "not is_cast",
        "unit/tracing/shapes/test_symbolic_shapes.py::test_strides_of_attention_are_those_that_its_kernel_gives",
    ),
    Mutant(
        "tracing/verify/side_by_side.py",
        " or self.has_python or not self.written.isdisjoint(info(node).storages):",
        " or self.has_python:",
        "attacks/test_samples_meet.py::test_samples_that_meet_are_refused_with_the_line",
    ),
    Mutant(
        "tracing/verify/equivalence.py",
        "all(gap <= tolerance * largest for gap in gaps)",
        "max(gaps, default=0.0) <= tolerance * largest",
        "unit/tracing/verify/test_training_equivalence.py::test_what_is_no_number_is_seen_behind_a_first_piece",
    ),
    Mutant(
        "profiling/saved_storages.py",
        " and self.effects.alias[node] not in self.written:\n            first,",
        ":\n            first,",
        "unit/profiling/test_profile.py::test_a_view_that_is_written_to_takes_no_value_of_its_kind",
    ),
    Mutant(
        "profiling/node_timing.py",
        "node not in self._exact and self.effects.alias[node] not in self._written\n",
        "node not in self._exact\n",
        "unit/profiling/test_profile.py::test_a_view_that_is_written_to_takes_no_value_of_its_kind",
    ),
    Mutant(
        "profiling/node_timing.py",
        "node not in self._exact and self.effects.alias",
        "self.effects.alias",
        "unit/profiling/test_profile.py",
    ),
    Mutant(
        "profiling/node_timing.py",
        "[median(times) * there / (then or 1.0)]",
        "[median(times)]",
        "unit/profiling/test_profile.py::test_a_very_long_node_is_scaled_to_other_sizes_by_its_operations",
    ),
    Mutant(
        "profiling/node_kinds.py",
        "repr(args), state_of(node), changed",
        "repr(args), changed",
        "unit/profiling/test_profile.py::test_an_equal_layer_without_gradients_is_of_another_kind",
    ),
    Mutant(
        "profiling/saved_storages.py",
        (
            "                if place not in self.seen[number].savers[-1:]:\n"
            "                    self.seen[number].savers.append(place)"
        ),
        "                self.seen[number].savers.append(place)",
        "unit/profiling/test_saved_storages.py::test_a_node_that_saves_a_storage_twice_saves_it_once",
    ),
    Mutant(
        "tracing/fake_tensors.py",
        "        if self.is_blind and not _VALUE_TAGS",
        "        if False and not _VALUE_TAGS",
        "unit/profiling/test_saved_storages.py::test_values_of_other_nodes_are_not_read",
    ),
    Mutant(
        "tracing/record/other_sizes.py",
        "again(disguised, without_products=True)",
        "again(disguised)",
        "unit/tracing/record/test_small_batch.py::test_no_run_on_more_samples_than_a_micro_batch",
    ),
    Mutant(
        "profiling/saved_storages.py",
        "                if number in self.own:\n                    continue\n",
        "",
        "unit/profiling/test_saved_storages.py::test_stages_of_small_functions_save_what_is_said",
    ),
    Mutant(
        "profiling/memory.py",
        "saved[s.savers[0]].append(size)",
        "saved[s.savers[-1]].append(size)",
        "unit/profiling/test_memory.py::test_a_storage_counts_once_and_as_a_whole",
    ),
    Mutant(
        "profiling/memory.py",
        "if w <= s.savers[0])",
        "if w < s.savers[0])",
        "unit/profiling/test_memory.py::test_what_a_node_writes_and_keeps_is_made_by_it",
    ),
    Mutant(
        "utils/polynomial_bound.py",
        "- (0 if above else 1)\n    if kind in _ROUNDED_DOWN",
        "- (1 if above else 0)\n    if kind in _ROUNDED_DOWN",
        "unit/utils/test_polynomial.py::test_what_is_no_polynomial_is_bounded_by_one",
    ),
    Mutant(
        "utils/polynomial_bound.py",
        "above == (number > 0))",
        "above)",
        "unit/utils/test_polynomial.py::test_what_is_no_polynomial_is_bounded_by_one",
    ),
    Mutant(
        "profiling/formulas.py",
        "and n not in counted]",
        "]",
        "unit/profiling/test_profile.py::test_tied_weight_counts_once_at_its_first_user",
    ),
    Mutant(
        "profiling/formulas.py",
        "-(-seen[node] // samples) * traced.batch",
        "(seen[node] // samples) * traced.batch",
        "unit/profiling/test_memory.py::test_a_value_whose_size_depends_on_values_grows_from_what_was_seen_rounded_up",
    ),
)

PLANS = (
    Mutant(
        "planning/plans/data.py",
        "return self.received + self.again if recomputes else self.received",
        "return self.received",
        "unit/planning/plans/test_resized_plans.py::test_a_stage_that_recomputes_keeps_all_that_it_was_given",
    ),
    Mutant(
        "planning/plans/data.py",
        "own.bytes.kept(self.recomputes(stage))",
        "own.bytes.received",
        (
            "unit/planning/plans/test_resized_plans.py::"
            "test_the_memory_of_a_plan_has_what_only_a_recomputation_needs_for_each_micro_batch_in_flight"
        ),
    ),
    Mutant(
        "planning/plans/data.py",
        "return self.portals + self.portals_again if recomputes else self.portals",
        "return self.portals",
        "unit/planning/plans/test_resized_plans.py::test_a_stage_that_recomputes_keeps_all_that_it_was_given",
    ),
    Mutant(
        "planning/plans/retarget.py",
        "return max(0.0, known + float(formula.value(after) - formula.value(before))) if formula else known * times",
        "return known * times",
        "unit/planning/tuning/test_tuner.py::test_a_tiny_first_mini_batch_does_not_bind_later_ones",
    ),
    Mutant(
        "planning/plans/retarget.py",
        "math.ceil(known * times)",
        "known",
        "unit/planning/plans/test_resized_plans.py::test_bytes_without_a_formula_grow_in_proportion",
    ),
    Mutant(
        "planning/plans/data.py",
        "return self.chunks if self.batch is None else min(self.chunks, self.batch)",
        "return self.chunks",
        "unit/planning/test_given_plans.py::test_what_is_planned_for_fewer_samples_than_chunks_is_what_runs",
    ),
    Mutant(
        "planning/plans/data.py",
        "optimizer_bytes=stage.state_bytes - stage.gradient_bytes",
        "optimizer_bytes=stage.state_bytes",
        "unit/simulation/test_simulated_plans.py::test_peaks_are_those_of_the_formulas_of_the_plan",
    ),
    Mutant(
        "simulation/costs.py",
        "return static + received * in_flight + saved * activations + working",
        "return static + received * in_flight + saved * activations",
        "unit/planning/test_choose.py::test_a_device_is_never_promised_twice",
    ),
    Mutant(
        "planning/plans/data.py",
        'return self.modes[stage] != "never"',
        'return self.modes[stage] == "always"',
        "unit/planning/plans/test_resized_plans.py::test_a_stage_that_recomputes_all_but_the_last_micro_batch_recomputes",
    ),
    Mutant(
        "planning/plans/data.py",
        "input_bytes=sizes.kept(recomputes).at(here) - portals",
        "input_bytes=sizes.kept(recomputes).at(here)",
        "unit/simulation/test_simulated_plans.py::test_peaks_are_those_of_the_formulas_of_the_plan",
    ),
)


DISTRIBUTED = (
    Mutant(
        "distributed/failures.py",
        'answer["name"]) if token in answer["tokens"] else None',
        'answer["name"])',
        "unit/distributed/test_bounded_store.py",
    ),
    Mutant(
        "distributed/failures.py",
        'own.ask("check", here):',
        'own.ask("check", here[:1]):',
        "unit/distributed/test_bounded_store.py",
    ),
    Mutant(
        "distributed/failures.py",
        "answer.result(self.seconds)",
        "answer.result()",
        "unit/distributed/test_bounded_store.py",
    ),
    Mutant(
        "distributed/failures.py",
        "answer.set_exception(error)",
        "answer.set_result(None)",
        "unit/distributed/test_bounded_store.py",
    ),
    Mutant(
        "distributed/packets.py",
        "payload_bytes(self._known.get(key[:-1]) or ())",
        "payload_bytes(self._known.get(key) or ())",
        "unit/distributed/test_packets.py",
    ),
    Mutant(
        "runtime/mini_batch.py",
        "return self.report.divisor",
        "return None",
        "behaviour/test_over_ranks_streams.py::test_a_stream_over_four_ranks_is_that_of_one_process",
    ),
    Mutant(
        "distributed/rank_stream.py",
        "        self._has_more = False\n        if failure is not None:",
        "        if failure is not None:",
        "behaviour/test_over_ranks_streams.py::test_who_has_the_inputs_ends_the_stream_for_all",
    ),
    Mutant(
        "pipe/train_stream.py",
        "        return mix_seed(self._seed, self._read)\n",
        "        return self._seed\n",
        "behaviour/test_over_ranks_streams.py::test_a_stream_over_four_ranks_is_that_of_one_process",
    ),
    Mutant(
        "runtime/stream.py",
        "        self.note_applied(error)\n",
        "        pass\n",
        "behaviour/test_over_ranks_streams.py::test_a_stage_that_raises_stops_the_others_and_all_say_what_was_applied",
    ),
    *(
        Mutant(file, text, other, f"behaviour/test_over_ranks_streams.py::{test}")
        for file, text, other, test in [
            (
                "distributed/rank_engine.py",
                "losses.portion, losses.unit = part.portions[part.replica],",
                "losses.unit =",
                "test_a_stream_of_replicas_is_that_of_their_mini_batches_together",
            ),
            (
                "distributed/rank_stream.py",
                "first_micro_batch=part.first",
                "first_micro_batch=0",
                "test_replicas_draw_the_numbers_of_the_mini_batches_together",
            ),
            (
                "distributed/held_tensors.py",
                "    if group.replica != 0:\n",
                "    if False:\n",
                "test_sparse_gradients_are_summed_and_buffers_are_those_of_the_first_replica",
            ),
            (
                "distributed/rank_stream.py",
                "        LossVerdict(evidence, firsts=admitted.part.firsts).check(None, 0)\n",
                "",
                "test_a_mean_over_other_numbers_of_elements_on_each_replica_is_refused",
            ),
            (
                "distributed/rank_stream.py",
                "if any(count for _, count in reports):",
                "if False:",
                "test_gradients_that_no_update_takes_are_those_of_all_replicas",
            ),
            (
                "distributed/replicas.py",
                "        if len({*others}) > 1:\n",
                "        if False:\n",
                "test_what_fails_in_one_replica_stops_all_and_the_next_stream_works",
            ),
            (
                "distributed/replicas.py",
                "        if len(known) < len(starts):\n            return None\n",
                "",
                "test_a_stream_ends_with_the_first_replica_that_ends",
            ),
        ]
    ),
    Mutant(
        "distributed/rank_state.py",
        "        for name in (*tied, *others):\n",
        "        for name in ():\n",
        "behaviour/test_over_ranks_streams.py::test_what_cannot_be_a_stream_over_ranks_is_refused_by_name",
    ),
    Mutant(
        "planning/choose.py",
        "is_relayed=placed.is_over_processes and are_adjacent",
        "is_relayed=False",
        "unit/planning/plans/test_plan_packets.py",
    ),
    Mutant(
        "partitioning/chain.py",
        "users=tuple(range(maker + 1, min(flow.users[-1], n) + 1))",
        "users=tuple(range(maker + 1, min(flow.users[-1], n)))",
        "unit/partitioning/test_optimal.py",
    ),
    Mutant(
        "distributed/packets.py",
        "parts[one.is_on_device], _next_start(ends[one.is_on_device])",
        "parts[one.is_on_device], ends[one.is_on_device]",
        "behaviour/test_over_ranks.py unit/distributed/test_packets.py",
    ),
    Mutant(
        "distributed/packets.py",
        "(torch.empty(size, dtype=torch.uint8), placeholder)",
        "(torch.empty(size, dtype=torch.uint8), None)",
        "unit/distributed/test_packets.py",
    ),
    Mutant(
        "distributed/rank_group.py",
        "ranks.setdefault(one.uuid, rank) != rank",
        "False",
        "unit/distributed/test_device_transfers.py",
    ),
    Mutant(
        "distributed/packets.py",
        "is_known = layout == known",
        "is_known = known is not None",
        "unit/distributed/test_packets.py",
    ),
    Mutant(
        "distributed/initialization.py",
        "if strict and all_missing:",
        "if strict and missing:",
        "unit/distributed/test_checkpoint_readers.py",
    ),
    Mutant(
        "distributed/packets.py", "maker = coming.popleft()", "maker = needed[0]", "unit/distributed/test_packets.py"
    ),
    Mutant(
        "distributed/replicas.py",
        "return sorted([*full, *filling.values()], key=lambda bucket: order.index(bucket[-1]))",
        "return [*full, *filling.values()]",
        "unit/distributed/test_gradient_reduction.py",
    ),
    Mutant(
        "distributed/packets.py",
        "            self.mailbox.finish_send(self._address(values_of)[0], what)\n",
        "",
        "unit/distributed/test_rank_step.py",
    ),
    Mutant(
        "distributed/replicas.py",
        "    portions = [start.batch / batch for start in starts]",
        "    portions = [1 / len(starts) for start in starts]",
        "behaviour/test_over_ranks_data_parallel.py",
    ),
    Mutant(
        "distributed/replicas.py",
        "        every[part.replica] = ([*own], *more)  # with gradients\n",
        "",
        "behaviour/test_over_ranks_joint_losses.py::test_targets_of_a_replica_get_their_gradients",
    ),
    Mutant(
        "distributed/rank_engine.py",
        "bound.known_pieces(union, part.batch)",
        "bound.known_pieces(inputs.leaves[: len(bound.in_dims)], inputs.batch)",
        "behaviour/test_over_ranks_joint_losses.py::test_labels_that_count_by_the_scale_of_all_samples",
    ),
    Mutant(
        "distributed/replicas.py",
        "kinds == {None} or not first.is_floating_point():",
        "kinds == {None}:",
        "unit/distributed/test_target_of_union.py::test_integers_of_all_samples_are_equal_and_not_nearly",
    ),
    Mutant(
        "distributed/rank_engine.py",
        "earlier = {key: leaf.grad / replicas.count for",
        "earlier = {key: leaf.grad for",
        "behaviour/test_over_ranks_data_parallel.py",
    ),
    Mutant(
        "distributed/rank_engine.py",
        "for parameter, gradient in self._earlier:",
        "for parameter, gradient in ():",
        "behaviour/test_over_ranks_data_parallel.py",
    ),
    Mutant(
        "distributed/replicas.py",
        "        if self._reduced != reduced:\n",
        "        if self._reduction is None:\n",
        "unit/distributed/test_gradient_reduction.py::test_a_step_that_trains_other_parameters_sums_their_gradients",
    ),
    Mutant(
        "distributed/rank_engine.py",
        'if all(self._group.connection.all_gather(is_finite, "the gradients of the other ranks to be finite")):',
        "if is_finite:",
        "behaviour/test_over_ranks_grad_scaler.py",
    ),
    Mutant(
        "distributed/rank_engine.py",
        "super()._end()\n        self.group.close()",
        "super()._end()",
        "behaviour/test_ends.py::test_no_thread_of_a_connection_is_left_to_the_end_of_the_interpreter",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        "return min(self.chunks, max(1, batch // self.least_samples))",
        "return min(self.chunks, batch)",
        "attacks/test_ignored_arguments.py::test_batch_norm_trains_on_a_small_last_batch",
    ),
    Mutant(
        "pipe/pipeline_state.py",
        "if limit is not None and memory.peak > limit:",
        "if limit is not None and memory.peak < limit:",
        "attacks/test_ignored_arguments.py::test_a_memory_limit_holds_or_a_warning_says_what_to_do",
    ),
    Mutant(
        "distributed/rank_engine.py",
        "if self.group.replica == 0:\n            one.commit_buffers()",
        "if True:\n            one.commit_buffers()",
        "behaviour/test_over_ranks_data_parallel.py",
    ),
    Mutant(
        "distributed/pipeline.py",
        "ordered = [norms[name] for name in names.values() if name in norms]",
        "ordered = [norm for of_rank in everybody for norm in of_rank.values()]",
        "behaviour/test_over_ranks_data_parallel.py",
    ),
    *(
        Mutant(f"distributed/{file}.py", before, after, f"behaviour/test_over_ranks{test}")
        for file, before, after, test in [
            (
                "rank_exchange",
                "                self._returning[gradient_key, i] = one.value\n",
                "                pass\n",
                ".py",
            ),
            ("rank_exchange", " and not totals.sums[name].is_sparse:", ":", "_data_parallel.py"),
            ("held_tensors", "sorted({routes.rank(j) for j in users} - {*holders})", "()", ".py"),
            ("held_tensors", "for name in names if k == j and name in tied)", "for name in ())", "_data_parallel.py"),
            (
                "held_tensors",
                "            if value is not None:\n                one.totals",
                "            if False:\n                one.totals",
                ".py",
            ),
            ("held_tensors", "if has_values(target) and target.device == value.device:", "if True:", ".py"),
            ("rank_group", "if {*own} & {*others} != {dist.get_rank()}:", "if False:", "_data_parallel.py"),
            ("rank_state", "if job.mode != self._mode():", "if False:", "_failures.py"),
            ("rank_state", "if seed is None and group.rank != leader and any(", "if False and any(", ".py"),
            ("rank_state", "if len(targets) != len(inputs.bounds):", "if False:", ".py"),
            ("rank_state", "            vars(self).update(state)\n", "", "_failures.py"),
            ("rank_state", "            self._send(self.held.shared, bound.constants)\n", "", ".py"),
            (
                "rank_state",
                "if self.group.replica_count > 1:  # each rank may have drawn different values",
                "if False:",
                "_data_parallel.py",
            ),
            ("rank_engine", "self.replicas.count > 1 and one.loss.bound.is_weighed", "False", "_data_parallel.py"),
            ("rank_engine", "if one.loss is None or self.replicas.count > 1:", "if False:", "_data_parallel.py"),
            ("rank_engine", "        check_scales(reports)\n", "", "_grad_scaler.py"),
            (
                "rank_engine",
                "sums[k] = gradient * scale if scale != 1 and id(leaf) in shared else gradient",
                "sums[k] = gradient",
                "_data_parallel.py",
            ),
            (
                "rank_engine",
                "gradient_rollback(leaves_below(root), is_certain=any_hooks)",
                "gradient_rollback(leaves_below(root))",
                "_data_parallel.py",
            ),
            (
                "replicas",
                "firsts = [sum(start.micro_batches for start in starts[:k]) for k",
                "firsts = [0 for k",
                "_data_parallel.py",
            ),
            ("initialization", "if not torch.equal(again[prefix + name], tensor):", "if False:", "_meta_device.py"),
        ]
    ),
    *(
        Mutant(f"distributed/{file}.py", before, after, f"unit/distributed/{test}")
        for file, before, after, test in [
            ("rank_group", "        self.generation += 1  # messages", "        # messages", "test_rank_step.py"),
            ("rank_exchange", "if (j, last_b.micro_batch) in split:", "if True:", "test_rank_step.py"),
            (
                "held_tensors",
                "if tensor.numel() and not keep(tensor):",
                "if tensor.numel():",
                "test_materialization.py",
            ),
            ("held_tensors", "sharing[key] < 2:", "True:", "test_materialization.py"),
            ("replicas", "        self._unit = None\n", "", "test_gradient_reduction.py"),
            (
                "packets",
                "            while self._freed[cut] < self.mailbox.note:",
                "            while False:",
                "test_rank_step.py",
            ),
        ]
    ),
)

INSPECT = (
    Mutant(
        "inspect/cli_options.py",
        "if least is not None and most is not None and least > most:",
        "if least is not None and most is not None and least >= most:",
        "cli/test_inspect_sizes.py::test_options_are_read",
    ),
    Mutant(
        "inspect/cli_options.py",
        "return name, int(device) if device.isdecimal() else device",
        "return name, device",
        "cli/test_inspect.py::test_parse_pin",
    ),
    Mutant(
        "inspect/cli_options.py",
        "            if name in pairs:\n",
        "            if False:\n",
        "cli/test_inspect_targets.py::test_refusals_of_planning_name_the_option",
    ),
    Mutant(
        "inspect/run.py",
        "other = taken.setdefault(path.resolve(), option)",
        "other = taken.setdefault(path, option)",
        "cli/test_inspect_files.py::test_places_are_looked_at_before_the_work",
    ),
    Mutant(
        "inspect/cli_options.py",
        "return len(devices) if are_here else max(len(devices), usual)",
        "return max(len(devices), usual)",
        "cli/test_inspect_sweep.py::test_devices_of_a_sweep",
    ),
    Mutant(
        "inspect/cli_options.py",
        "shared = None if own.adapters_per_node is None else min(size, own.adapters_per_node)",
        "shared = own.adapters_per_node",
        "cli/test_inspect_sweep.py::test_devices_of_a_sweep",
    ),
    Mutant(
        "inspect/targets.py",
        'below = 2 if shape.dtype == "bool" else integers_below',
        "below = integers_below",
        "cli/test_inspect_targets.py::test_integers_below_a_vocabulary_and_inputs_without_values",
    ),
    Mutant(
        "inspect/targets.py",
        'where, _, name = text.rpartition(":")',
        'where, _, name = text.partition(":")',
        "cli/test_inspect.py::test_parse_target",
    ),
    Mutant(
        "simulation/simulation_result.py",
        "key=lambda d: (-shares[d], -self.needs[d])",
        "key=lambda d: (-self.needs[d], -shares[d])",
        "cli/test_inspect_sweep.py::test_the_device_that_is_closest_to_its_limit_is_told",
    ),
    Mutant(
        "inspect/step_summary.py",
        "fullest = simulation.fits.fullest[:MAX_DEVICE_ROWS]",
        "fullest = simulation.fits.fullest[-MAX_DEVICE_ROWS:]",
        "cli/test_inspect_sweep.py::test_of_many_devices_those_are_shown_that_hold_most",
    ),
    Mutant(
        "inspect/plan_text.py",
        "rows.sort(key=lambda same: -same[0].bytes)",
        "rows.sort(key=lambda same: same[0].bytes)",
        "unit/inspect/test_stage_graph.py::test_the_largest_portals_are_listed_and_the_others_counted",
    ),
    Mutant(
        "inspect/style.py",
        "count = int(seconds / step * (1 + 1e-9))",
        "count = int(seconds / step) + 1",
        "unit/inspect/test_gantt.py::test_nothing_is_cut_off_and_no_text_covers_another",
    ),
    Mutant(
        "inspect/style.py",
        "DARK_KINDS = (ActionKind.BACKWARD, ActionKind.UPDATE)",
        "DARK_KINDS = (ActionKind.BACKWARD,)",
        "unit/inspect/test_scene.py::test_letters_are_legible_on_every_colour",
    ),
    Mutant(
        "inspect/style.py",
        "        tail = kept // 2\n",
        "        tail = 0\n",
        "unit/inspect/test_scene.py::test_a_text_is_shortened_in_its_middle",
    ),
    Mutant("inspect/svg.py", '.replace(\'"\', "&quot;")', "", "unit/inspect/test_scene.py::test_any_text_stays_text"),
    Mutant(
        "inspect/svg.py",
        "back = next((p for p in (curve.control[1], curve.control[0], curve.start) if p != curve.end), (x - 1, y))",
        "back = curve.start",
        "unit/inspect/test_scene.py::test_an_arrow_comes_from_the_last_control_point_that_is_not_its_end",
    ),
    Mutant(
        "inspect/gantt.py",
        "return frame.x(span.start), frame.x(span.start + span.receiving), frame.x(span.end)",
        "return frame.x(span.start), frame.x(span.start), frame.x(span.end)",
        "unit/inspect/test_gantt.py::test_what_a_device_copies_is_a_box_before_its_action",
    ),
    Mutant(
        "inspect/perfetto.py",
        '"ts": max(start, end - 1) / 1e3',
        '"ts": end / 1e3',
        "unit/inspect/test_gantt.py::test_the_trace_of_a_simulation_has_its_actions_arrows_and_memory",
    ),
    Mutant(
        "inspect/gantt.py",
        "if limit <= FLAT_LIMIT_RATIO * peak}",
        "if limit >= FLAT_LIMIT_RATIO * peak}",
        "unit/inspect/test_gantt.py::test_a_limit_is_a_line_unless_it_would_flatten_the_curves",
    ),
    Mutant(
        "inspect/gantt.py",
        "MemoryFit(peaks, limits).fullest[:MAX_PANELS]",
        "MemoryFit(peaks, limits).fullest[-MAX_PANELS:]",
        "unit/inspect/test_gantt.py::test_of_many_devices_those_closest_to_their_limits_have_a_panel",
    ),
    Mutant(
        "inspect/json_document.py",
        '"placement": [stage.rows[0] for stage in figures.stages]',
        '"placement": list(plan.placement)',
        "cli/test_shown_figures.py::test_the_report_has_the_stages_of_devices_whose_replicas_take_turns",
    ),
)

OPTIONS = (
    Mutant(
        "planning/options/parse.py",
        'if not isinstance(value, bool):\n        raise ArgumentTypeError(f"{name}={value!r}: expected True or False")',
        "pass",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        '(f"{letter}IB", 1024)',
        '(f"{letter}IB", 1000)',
        "unit/planning/options/test_pipeline_options.py::test_one_limit_for_all",
    ),
    Mutant(
        "planning/options/parse.py",
        "if not 1 <= number * unit < math.inf:",
        "if not 0 <= number * unit < math.inf:",
        "unit/planning/options/test_pipeline_options.py::test_what_is_no_limit_is_refused",
    ),
    Mutant(
        "planning/options/parse.py",
        "if by_name and len(entries) > stages - 1:",
        "if by_name and len(entries) > stages:",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "if not by_name and len(entries) != stages:",
        "if not by_name and len(entries) > stages:",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "    if len(places) != 1:\n",
        "    if not places:\n",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "if not 0 <= value < len(workers):",
        "if value >= len(workers):",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        'if value.get("mode") in ("reduce-overhead", "max-autotune") or graphs:',
        'if value.get("mode") in ("reduce-overhead", "max-autotune"):',
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        "if unknown := kwargs.keys() - names:",
        "if unknown := set():",
        "unit/planning/options/test_pipeline_options.py::test_another_keyword_is_refused_as_python_does",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        "if isinstance(value, (str, float, int)):\n        return bool(value == default)",
        "if True:\n        return bool(value == default)",
        "unit/planning/options/test_pipeline_options.py::test_what_is_left_out_is_never_compared_with_a_tensor",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        '"chunks": plan.chunks if isinstance(chunks, str) and chunks == AUTO else chunks,',
        '"chunks": chunks,',
        "unit/planning/options/test_pipeline_options.py::test_a_plan_brings_what_is_left_out",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        '"checkpoint": plan.checkpoint if checkpoint == AUTO else checkpoint,',
        '"checkpoint": checkpoint,',
        "unit/planning/options/test_pipeline_options.py::test_a_plan_brings_what_is_left_out",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        "if not replica_workers and len(rows) % data:",
        "if False:",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        'pins = parse.parse_pins("balance", balance, workers) | pins',
        'pins = pins | parse.parse_pins("balance", balance, workers)',
        "unit/planning/options/test_pipeline_options.py::test_a_pin_goes_before_the_map_of_modules",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        'is_free = is_free and options["balance"] != "pipedream"  # its',
        "is_free = is_free and True  # its",
        "unit/planning/options/test_pipeline_options.py::test_stages_of_pipedream_have_a_device_each",
    ),
    Mutant(
        "planning/options/pipeline_options.py",
        'if plan.balance != "pipedream" or (set(plan.replicas) == {ranks} and not plan.turns):',
        'if plan.balance != "pipedream" or set(plan.replicas) == {ranks}:',
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "    if stages % each:\n",
        "    if False:\n",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "if per_device is not None and table.stages != workers * per_device:",
        "if False:",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "if not any(action.kind is ActionKind.BACKWARD for action in actions):",
        "if False:",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/options/parse.py",
        "        if workers != accepted:\n",
        "        if workers < accepted:\n",
        "unit/planning/options/test_pipeline_options.py::test_what_an_option_cannot_be_is_said",
    ),
    Mutant(
        "planning/entry.py",
        "if stages is not None and stages != len(settings.placement):",
        "if False:",
        "unit/runtime/test_shared_devices.py::test_numbers_that_do_not_fit_together",
    ),
)

PLANNING = (
    Mutant(
        "runtime/commit.py",
        "return new + have",
        "return have + new",
        "behaviour/test_backward.py::test_large_gradients_are_those_of_the_plain_model",
    ),
    Mutant(
        "tracing/guards.py",
        "return not reads or all(",
        "return True or all(",
        "unit/tracing/record/test_small_batch.py::test_value_that_is_read_is_that_of_all_samples",
    ),
    Mutant(
        "planning/cost_model.py",
        "if needing_all(traced.combinations) is None:",
        "if traced.combinations is not None:",
        "behaviour/test_joint_tail.py::test_plans_know_the_tail",
    ),
    Mutant(
        "profiling/loss_cost.py",
        "return ahead / self.micro_batches, back / self.micro_batches",
        "return ahead, back",
        "unit/profiling/test_loss_cost.py::test_a_micro_batch_has_its_share_of_a_joint_tail",
    ),
    Mutant(
        "planning/cost_model.py",
        "is_between_processes = settings.is_over_processes and",
        "is_between_processes = settings.processes and",
        "unit/planning/test_cost_model.py::test_cuts_are_compared_by_the_step_that_their_plan_will_have",
    ),
    Mutant(
        "planning/choose.py",
        "handling=MESSAGE_SECONDS if chain.is_relayed else 0.0",
        "handling=0.0",
        "unit/planning/test_cost_model.py::test_cuts_are_compared_by_the_step_that_their_plan_will_have",
    ),
    Mutant(
        "profiling/flops.py",
        "read = {id(t): t for t in tensors_in((args, kwargs))}",
        "read = {storage_of(t): t for t in tensors_in((args, kwargs))}",
        "unit/profiling/test_saved_storages.py::test_one_node_of_a_kind_stands_for_others_as_a_tensor_of_its_own",
    ),
    Mutant(
        "planning/cost_model.py",
        "max(size, announced.get(symbol, size))",
        "size",
        "unit/planning/plans/test_plan_sizes.py::test_memory_limits_are_asked_at_the_largest_size",
    ),
    Mutant(
        "planning/cost_model.py",
        "settings.row_devices.count(device)",
        "1",
        "unit/planning/test_stage_devices.py::test_memory_at_hand_is_a_limit",
    ),
    Mutant(
        "planning/cost_model.py",
        "memory=None if memory is None else memory / placement.count(k)",
        "memory=memory",
        "unit/planning/test_choose.py::test_a_device_is_never_promised_twice",
    ),
    Mutant(
        "planning/cost_model.py",
        "state=versions + settings.optimizer_state",
        "state=1 + settings.optimizer_state",
        "unit/planning/plans/test_weight_versions.py::test_versions_count_in_the_limit_of_memory_and_the_error_tells_how_many",
    ),
    Mutant(
        "planning/cost_model.py",
        "maker, returns, users = writer, effects.alias[node] in with_gradient, [u for u in users if u > writer]",
        "maker, users = writer, [u for u in users if u > writer]",
        "unit/planning/test_cost_model.py::test_an_input_that_is_written_to_is_sent_by_the_stage_that_does_so",
    ),
    Mutant(
        "planning/cost_model.py",
        "            row[-1] += seconds\n",
        "            pass\n",
        "unit/profiling/test_loss_cost.py::test_the_cut_heeds_the_loss",
    ),
    Mutant(
        "planning/choose.py",
        "if all(whole is None or together <= whole for whole, together in zip(wholes, sums, strict=True)):",
        "if True:",
        "unit/planning/test_choose.py::test_a_device_is_never_promised_twice",
    ),
    Mutant(
        "planning/choose.py",
        "most = min(most, hardware.most_devices)",
        "pass",
        "unit/planning/test_choose.py::test_no_more_devices_are_tried_than_a_node_without_a_network_has",
    ),
    Mutant(
        "planning/choose.py",
        "starts.update(traced.cut_mark_places)",
        "pass",
        "unit/planning/test_manual_cuts.py::test_marks_in_forward_end_stages",
    ),
    Mutant(
        "planning/describe_cut.py",
        "return tuple(round(part / total, _SHARE_DIGITS) for part in seconds) if total else ()",
        "return tuple(round(part, _SHARE_DIGITS) for part in seconds) if total else ()",
        "unit/planning/test_cost_model.py::test_shares_of_nodes_are_those_of_forward_and_backward_together",
    ),
    Mutant(
        "planning/describe_cut.py",
        "max(seconds_of_nodes, key=lambda one: one[2].at(samples))",
        "seconds_of_nodes[0]",
        "unit/planning/plans/test_resized_plans.py::test_the_heaviest_node_bounds_the_balance",
    ),
    Mutant(
        "planning/describe_cut.py",
        "if key in users and (len(own) > 1 or len({*users[key]}) > 1)",
        "if key in users and len(own) > 1",
        "unit/planning/plans/test_resized_plans.py::test_a_parameter_of_two_stages_and_one_of_two_names",
    ),
    Mutant(
        "planning/tuning/candidates.py",
        "return (0.0 if is_least else row.step_seconds, row.peak,",
        "return (row.step_seconds, row.peak,",
        "unit/planning/tuning/test_tuner.py::test_of_equally_long_steps_the_one_with_least_memory_is_chosen",
    ),
)

MUTANTS = (
    *RUNTIME, *SCHEDULING, *SIMULATION, *PARTITIONING, *REWRITING, *TRACING, *PROFILING, *PLANS, *DISTRIBUTED,
    *INSPECT, *OPTIONS, *PLANNING,
)  # fmt: skip


# -- running ---------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Tests, on a package with a fault or, to begin with, without."""

    tests: str
    mutant: Mutant | None = None
    limit: float = 1800.0  # seconds


WITHOUT_TESTS = Run("")


@dataclass(slots=True)
class Job:
    """A copy of the package, and what runs in it."""

    root: Path
    run: Run = WITHOUT_TESTS
    process: int = 0
    begun: float = 0.0

    def begin(self, run: Run) -> None:
        """Runs tests on the copy, with the fault in it if there is one."""
        self.run, self.begun = run, time.monotonic()
        if run.mutant is not None:
            path = self.root / "fxpipe" / run.mutant.file
            self._write(path, run.mutant.apply(path.read_text()))
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            _run_tests(self.root, run.tests.split())

    def result(self) -> str | None:
        """None while it runs; then "passed", or why not."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        is_late = not ended and time.monotonic() - self.begun > self.run.limit
        if not ended and not is_late:
            return None
        if is_late:
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        if (mutant := self.run.mutant) is not None:
            self._write(self.root / "fxpipe" / mutant.file, (ROOT / "fxpipe" / mutant.file).read_text())
        if is_late:
            return "hangs"
        code = os.waitstatus_to_exitcode(status)
        return "passed" if code == 0 else f"fails ({code})"

    def seen_by(self) -> str:
        """The test that has failed, where one has."""
        lines = (self.root / "output.txt").read_text(errors="replace").splitlines()
        return next((line.split()[1].removeprefix("tests/") for line in lines if line.startswith("FAILED ")), "")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # may be as old, and as long
            compiled.unlink()


def _run_tests(root: Path, tests: Sequence[str]) -> None:
    """In the child: ends the process."""
    code = 3
    try:
        os.setsid()
        output = os.open(root / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path.insert(0, str(root))
        sys.dont_write_bytecode = True
        import pytest

        code = int(
            pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def copied(root: Path) -> Job:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name)
        else:
            shutil.copy2(source, root / name)
    return Job(root)


def results(jobs: Sequence[Job], runs: Sequence[Run]) -> Iterator[tuple[Job, str, float]]:
    """What came of each run, and after how many seconds, in the order in which they end."""
    waiting, free, busy = list(runs)[::-1], list(jobs), []
    try:
        while waiting or busy:
            while waiting and free:
                job = free.pop()
                job.begin(waiting.pop())
                busy.append(job)
            for job in list(busy):
                if (result := job.result()) is not None:
                    busy.remove(job)
                    yield job, result, time.monotonic() - job.begun
                    free.append(job)
            time.sleep(0.02)
    finally:
        for job in busy:  # interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process, signal.SIGKILL)
            os.waitpid(job.process, 0)


def without_faults(jobs: Sequence[Job], mutants: Sequence[Mutant]) -> dict[str, float]:
    """How many seconds each of the tests takes on the package as it is.

    Raises:
        SystemExit: one does not pass.
    """
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests.split())
    times = {}
    for job, result, seconds in results(jobs, [Run(test) for test in tests]):
        if result != "passed":
            output = (job.root / "output.txt").read_text()[-4000:]
            raise SystemExit(f"the tests do not pass without a fault: {job.run.tests} {result}\n{output}")
        times[job.run.tests] = seconds
    return times


def run_of(mutant: Mutant, times: Mapping[str, float]) -> Run:
    """`times`: how many seconds its tests take without the fault."""
    return Run(mutant.tests, mutant, LIMIT + TIMES * sum(times[test] for test in mutant.tests.split()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many to run at a time")
    parser.add_argument("--only", default="", help="those whose file, text or tests have this in them")
    parser.add_argument("--list", action="store_true", help="print the faults, and run none")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in f"{m} {m.tests}"]
    if arguments.list:
        print(*(f"{m}  [{m.why_equivalent or m.tests}]" for m in chosen), sep="\n")
        return 0
    for mutant in chosen:
        mutant.apply((ROOT / "fxpipe" / mutant.file).read_text())
    to_run = [mutant for mutant in chosen if not mutant.why_equivalent]
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="fxpipe-mutants-") as folder:
        jobs = [copied(Path(folder) / str(k)) for k in range(max(1, arguments.jobs))]
        times = without_faults(jobs, to_run)
        counts = {"caught": 0, "survived": 0, "equivalent": 0}
        for job, result, seconds in results(jobs, [run_of(mutant, times) for mutant in to_run]):
            word = "survived" if result == "passed" else "caught"
            counts[word] += 1
            print(f"{word:8}  {seconds:5.1f} s  {job.run.mutant}  [{job.seen_by() or result}]", flush=True)
    for mutant in chosen:
        if mutant.why_equivalent:
            counts["equivalent"] += 1
            print(f"equivalent  {mutant}: {mutant.why_equivalent}")
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
