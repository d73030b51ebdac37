"""Partitioning: the least bottleneck and the bound of the theorem against brute force; cuts by hand; every refusal."""

import ast
import math
import pathlib
import random
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from helpers.partition_problems import partition
from hypothesis import given
from hypothesis import strategies as st

import fxpipe.partitioning.block
from fxpipe.errors import ArgumentTypeError, PartitionError
from fxpipe.partitioning.block import block_partition

finite = st.floats(min_value=0, max_value=1e300)
small = st.integers(0, 4).map(float)  # many zeros and many ties
noisy = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.1 + 0.2, 0.7, 1e-17])
wild = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 1.0 + 2**-52, 1e16, 1e16 + 2, 1e300])
rows = st.one_of(*(st.lists(cost, min_size=1, max_size=9) for cost in (small, noisy, wild, finite)))


def block_sums(costs: Sequence[float], lengths: Sequence[int]) -> list[Fraction]:
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)
    return [sum(map(Fraction, costs[start:stop]), Fraction(0)) for start, stop in pairwise(cuts)]


def least_bottleneck(costs: Sequence[float], blocks: int) -> Fraction:
    """By trying every way to cut."""
    n = len(costs)
    return min(
        max(block_sums(costs, [b - a for a, b in pairwise((0, *cuts, n))]))
        for cuts in combinations(range(1, n), blocks - 1)
    )


def check_blocks(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Whatever the costs: every block has items, all items are in blocks, and any two sums are within the bound."""
    lengths = block_partition(costs, blocks)
    assert len(lengths) == blocks
    assert min(lengths) >= 1
    assert sum(lengths) == len(costs)
    sums = block_sums(costs, lengths)
    assert max(sums) - min(sums) <= max(map(Fraction, costs))
    return lengths


# block_partition


@given(rows, st.data())
def test_least_bottleneck_and_bound(costs: list[float], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, len(costs)))
    lengths = check_blocks(costs, blocks)
    assert max(block_sums(costs, lengths)) == least_bottleneck(costs, blocks)


def test_least_bottleneck_and_bound_on_many_small_rows() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        n = rng.randint(1, 9)
        costs = [rng.choice([0, 0, 1, 2, 3, 5, 9]) for _ in range(n)]
        blocks = rng.randint(1, n)
        assert max(block_sums(costs, check_blocks(costs, blocks))) == least_bottleneck(costs, blocks)


def test_rows_of_zeros_are_cut_evenly() -> None:
    assert sorted(check_blocks([0.0] * 11, 4)) == [2, 3, 3, 3]


def test_of_equal_bottlenecks_that_of_the_fewest_items_is_taken() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        n = rng.randint(2, 9)
        costs = [rng.choice([0, 0, 0, 1, 2]) for _ in range(n)]
        blocks = rng.randint(2, n)
        # An item more makes a block larger, by less than any cost does.
        units = [cost * (n + 1) + 1 for cost in costs]
        assert max(block_sums(units, block_partition(costs, blocks))) == least_bottleneck(units, blocks)


def test_where_the_bottleneck_leaves_a_choice_cuts_are_next_to_even_shares() -> None:
    # 15 in 3 blocks: 5 each, but for the 8 that cannot be less.
    assert block_partition([1] * 7 + [8], 3) == (5, 2, 1)
    assert block_partition([8] + [1] * 7, 3) == (1, 2, 5)


@pytest.mark.parametrize(
    ("costs", "lengths"),
    [
        # The cuts nearest to even with the least bottleneck, 7, are 2 5 | 1 | 5 2: 6 apart; no item is larger than 5.
        ([2, 5, 1, 5, 2], {(2, 2, 1), (1, 2, 2)}),
        # In floats 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1, though the items are the same.
        ([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], {(3, 3)}),
        ([1e300, 5e-324, 5e-324, 1e300], {(2, 2)}),
        ([2**60 + 1, 2**60, 2**60, 2**60 + 1], {(2, 2)}),  # beyond floats
        ([10**400, 1, 10**400], {(1, 2), (2, 1)}),
    ],
)
def test_sums_are_exact(costs: list[float], lengths: set[tuple[int, ...]]) -> None:
    (blocks,) = {len(one) for one in lengths}
    assert check_blocks(costs, blocks) in lengths


@pytest.mark.parametrize("shape", ["heavy", "powers", "zeros"])
def test_ten_thousand_items_over_sixty_four_blocks(shape: str) -> None:
    rng = random.Random(3)
    cost = {
        "heavy": lambda i: rng.paretovariate(0.5),
        "powers": lambda i: 10.0 ** rng.uniform(-300, 300),
        "zeros": lambda i: float(i % 150 == 0),
    }[shape]
    check_blocks([cost(i) for i in range(10_000)], 64)


NAMES = ["x", "stem_conv", "stem_relu", "body_conv", "body_relu", "head"]
MODULES = ["", "stem.conv", "stem.relu", "body.0.conv", "body.0.relu", "head"]
COSTS = [0.0, 3.0, 1.0, 4.0, 1.0, 1.0]


def refusal(error: type[Exception], stages: Any = 2, **options: Any) -> str:
    with pytest.raises(error) as caught:
        partition(**{"costs": COSTS, "stages": stages, "names": NAMES, "modules": MODULES, **options})
    return str(caught.value)


@given(rows, st.data())
def test_forbidden_places_are_honoured(costs: list[float], data: st.DataObject) -> None:
    n = len(costs)
    forbidden = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    allowed = [place for place in range(1, n) if place not in forbidden]
    stages = data.draw(st.integers(1, len(allowed) + 1))
    cut = partition(costs, stages, forbidden=dict.fromkeys(forbidden, "they hang together"))
    assert cut.starts[0] == 0
    assert set(cut.starts[1:]) <= set(allowed)
    ways = ([b - a for a, b in pairwise((0, *cuts, n))] for cuts in combinations(allowed, stages - 1))
    sums = block_sums(costs, [b - a for a, b in pairwise((*cut.starts, n))])
    assert max(sums) == min(max(block_sums(costs, way)) for way in ways)
    assert cut.costs == tuple(map(float, sums))


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ([1, 3, 2], (0, 1, 4)),
        ((2, 2, 2), (0, 2, 4)),
        (["stem_conv", "body"], (0, 2, 5)),
        (["stem", "body"], (0, 3, 5)),  # modules that hold modules
        (["stem.relu", "body.0.conv"], (0, 3, 4)),
        (["x", "body_conv"], (0, 1, 4)),  # nodes
        (["body_conv"], (0, 3, 4)),  # and one more where costs say
        (["x"], (0, 1, 3)),
    ],
)
def test_cuts_by_hand(balance: Any, expected: tuple[int, ...]) -> None:
    cut = partition(COSTS, 3, balance=balance, names=NAMES, modules=MODULES)
    assert cut.starts == expected
    assert math.fsum(cut.costs) == 10.0


@given(rows, st.data())
def test_cuts_between_required_ones_are_the_best(costs: list[float], data: st.DataObject) -> None:
    n = len(costs)
    required = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    stages = data.draw(st.integers(len(required) + 1, n))
    names = [f"n{place}" for place in range(n)]
    cut = partition(costs, stages, balance=[names[place - 1] for place in required] or None, names=names)
    assert len(cut.starts) == stages
    assert set(required) <= set(cut.starts)
    ways = (sorted(cuts) for cuts in combinations(range(1, n), stages - 1) if set(required) <= set(cuts))
    best = min(max(block_sums(costs, [b - a for a, b in pairwise((0, *way, n))])) for way in ways)
    assert max(block_sums(costs, [b - a for a, b in pairwise((*cut.starts, n))])) == best


def test_a_module_is_not_found_by_half_its_name() -> None:
    assert "no node or module is named 'bod'" in refusal(PartitionError, balance=["bod"])


def test_more_stages_than_items_says_what_hangs_together() -> None:
    said = refusal(PartitionError, stages=5, forbidden={2: "relu_ writes to its input", 4: "one buffer"})
    assert said == (
        "stages=5, but the 6 nodes can be cut into 4 at most: 4 of the nodes cannot be separated from a neighbour, "
        "first node 'stem_relu' (place 2) from the one before it: relu_ writes to its input. Use stages=4 or fewer"
    )


def test_no_nodes() -> None:
    with pytest.raises(PartitionError, match="there are no nodes to cut"):
        partition([], 1)


@pytest.mark.parametrize(
    ("balance", "error", "says"),
    [
        ([3.0, 3], ArgumentTypeError, "3.0 is of type float; expected ints only (numbers of nodes) or strings only"),
        ([True, 5], ArgumentTypeError, "True is of type bool; expected ints only"),
        ([3, "head"], ArgumentTypeError, "'head' is of type str; expected ints only"),
        (["bodi.0"], PartitionError, "no node or module is named 'bodi.0'; close to it are 'body.0'"),
        (["zzzz"], PartitionError, "no node or module is named 'zzzz'; there are 'body', 'body.0',"),
        (["head"], PartitionError, "'head' ends with the last node, where the last stage ends without being named"),
    ],
)
def test_balance_refused(balance: Any, error: type[Exception], says: str) -> None:
    assert says in refusal(error, balance=balance)


def test_names_out_of_order_refused() -> None:
    assert refusal(PartitionError, stages=3, balance=["body", "stem"]) == (
        "'stem' ends with node 'stem_relu' (place 2), which is not behind node 'body_relu' (place 4), where 'body' "
        "ends: name each end once, in the order in which they run"
    )


def test_names_without_names_refused() -> None:
    said = refusal(PartitionError, balance=["head"], names=(), modules=())
    assert said == "'head' is given, but the nodes have no names here: cut by numbers of nodes"


@pytest.mark.parametrize("balance", [[2, 4], ["stem_conv"]])
def test_a_cut_by_hand_at_a_forbidden_place_refused(balance: Any) -> None:
    said = refusal(PartitionError, balance=balance, forbidden={2: "relu_ writes to its input", 3: "one buffer"})
    assert (
        "no cut can stand before node 'stem_relu' (place 2): relu_ writes to its input; "
        "the nearest allowed: before node 'stem_conv' (place 1) or node 'body_relu' (place 4)"
    ) in said


def test_all_that_is_wrong_with_cuts_is_said_at_once() -> None:
    said = refusal(PartitionError, stages=3, balance=[2, 2, 2], forbidden={2: "first", 4: "second"})
    assert said.startswith("the nodes cannot be cut so:\n- no cut")
    assert "first" in said
    assert "second" in said


def test_imports_the_standard_library_errors_costs_and_what_is_printed_with_only() -> None:
    shown = ("fxpipe.utils.units", "fxpipe.utils.text_table")
    ours = ("fxpipe.errors", "fxpipe.partitioning", "fxpipe.cluster", "fxpipe.simulation.costs", *shown)
    for file in pathlib.Path(fxpipe.partitioning.block.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names
                assert known or name.startswith(ours), (file.name, name)
