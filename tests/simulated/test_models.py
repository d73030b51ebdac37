"""Models of every kind are themselves on simulated devices: random ones, and some of the zoo."""

import pytest
from random_models.case import draw
from random_models.judge import judge
from zoo import BY_NAME
from zoo.ways import run

pytestmark = pytest.mark.simulated
SEEDS = range(10)  # among later ones are models whose Python makes tensors on the CPU, so that they run there alone
ZOO = """
drop_path frozen_batch_norm packed_sequence lstm_states inplace_residual writes_through_views tied_embedding
""".split()


@pytest.mark.filterwarnings("ignore")  # of modules that stay whole
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_is_itself(seed):
    verdict = judge(draw(seed))
    assert verdict.kind in ("right", "refused", "invalid"), verdict.detail


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_itself(name):
    row = run(BY_NAME[name], "fxpipe", "train", 3)
    assert row.verdict == "right", row.message
