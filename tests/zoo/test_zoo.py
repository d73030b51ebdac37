"""Models of the zoo as pipelines of three stages, in training and evaluation, against the plain model.

`make coverage` runs the whole zoo; here are all own models, some of transformers, and those that are hard to cut.
"""

import dataclasses

import pytest
import torch

from zoo import BY_NAME, KINDS, OWN, select
from zoo.entry import AT_SIZES, HANDED_OVER, MODES
from zoo.processes import rows_of
from zoo.reference import compare, direct_step
from zoo.sizes import MANY_GRAPHS, with_sizes
from zoo.ways import run

LIBRARY = (
    "bert", "bert_padded", "bert_hidden_states", "albert", "gpt2", "llama", "llama_cache", "bart", "wav2vec2", "vit",
    "wav2vec2_masked", "segformer", "convnext",
)  # fmt: skip
NAMES = (*(entry.name for entry in OWN), *LIBRARY)
REFUSED = {("gradient_penalty", way) for way in ("fxpipe", HANDED_OVER)}  # limits of today: an error that says why

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.slow] * (mode == "eval")) for mode in MODES])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_zoo_becomes_a_right_pipeline(name, mode):
    row = run(BY_NAME[name], "fxpipe", mode, 3)
    assert row.verdict == "right", row.message
    assert row.largest_leaf <= 0.6
    assert row.nodes > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fxpipe", HANDED_OVER])
@pytest.mark.parametrize("name", [entry.name for entry in KINDS])
def test_a_model_that_is_hard_to_cut_trains(name, way):
    row = run(BY_NAME[name], way, "train", 2)
    assert row.verdict == ("refused" if (name, way) in REFUSED else "right"), row.message


@pytest.mark.parametrize(
    ("name", "mode"),
    [("tied_embedding", "train"), ("packed_sequence", "eval"), ("bert_padded", "train"), ("resnet", "train")],
)
def test_a_model_of_the_zoo_takes_two_graphs_for_all_sizes(name, mode):
    row = run(BY_NAME[name], AT_SIZES, mode, 2)
    assert row.verdict == "right", row.message
    assert row.graphs == MANY_GRAPHS, row.message


def test_more_graphs_for_several_sizes_have_a_reason():
    row = run(BY_NAME["decorated_forward"], AT_SIZES, "eval", 2)
    assert (row.verdict, row.graphs) == ("right", len(row.sizes.split()) + 1)
    assert "one graph for each size: its size is fixed by unbind" in row.message


def test_sizes_that_vary_are_those_with_which_the_model_runs():
    sized = with_sizes(BY_NAME["vit"], training=False)
    assert sized is None  # pictures of one size
    sized = with_sizes(BY_NAME["resnet"], training=False)
    assert sized is not None
    assert {len(sizes) for sizes in sized.sizes} == {2}
    assert any(height != width for height, width in (sizes.values() for sizes in sized.sizes))


# -- the judge itself ------------------------------------------------------------------------------------------------


def _step(name):
    model, inputs = BY_NAME[name].build()
    return direct_step(model, model, inputs)


def test_the_judge_finds_each_difference():
    want, have = _step("auxiliary_head"), _step("auxiliary_head")
    assert compare(have, want).verdict == "right"
    path, logits = have.outputs[0]
    for outputs in ([(path, logits + 0.01), *have.outputs[1:]], have.outputs[:1], [(path, None), *have.outputs[1:]]):
        assert compare(dataclasses.replace(have, outputs=outputs), want).verdict == "wrong outputs"
    for gradient in (None, have.gradients["head.weight"] * 1.01):
        gradients = have.gradients | {"head.weight": gradient}
        assert compare(dataclasses.replace(have, gradients=gradients), want).verdict == "wrong gradients"
    buffers = have.buffers | {"norm.num_batches_tracked": torch.tensor(2)}
    assert compare(dataclasses.replace(have, buffers=buffers), want).verdict == "wrong buffers"


def test_other_ways_are_judged_as_they_deserve():
    assert run(BY_NAME["inplace_residual"], "symbolic_trace", "train", 3).verdict == "right"
    assert run(BY_NAME["mask_of_some"], "symbolic_trace", "train", 3).verdict == "fails"
    assert run(BY_NAME["drop_path"], "pipelining", "eval", 3).verdict == "right"
    assert run(BY_NAME["tied_embedding"], "pipelining", "eval", 3).verdict == "wrong gradients"


def test_a_process_that_ends_early_or_not_at_all_is_a_row():
    tasks = [("fxpipe", "eval", 1), ("unheard-of", "eval", 1), ("fxpipe", "eval", 1)]
    first, second, third = rows_of(BY_NAME["tied_embedding"], tasks, limit=120.0)
    assert (first.verdict, second.verdict, third.verdict) == ("right", "crashes", "right")
    assert "unheard-of" in second.message
    (row,) = rows_of(BY_NAME["tied_embedding"], tasks[:1], limit=0.01)
    assert row.verdict == "hangs"


def test_models_are_chosen_by_name_pattern_and_package():
    assert [entry.name for entry in select(["gpt2"])] == ["gpt2"]
    assert {entry.name for entry in select(["gpt2*"])} >= {"gpt2", "gpt2_cache"}
    assert {entry.family for entry in select(["monai", "own"])} == {"monai", "own"}
    with pytest.raises(SystemExit, match="no model is called nothing"):
        select(["nothing"])
