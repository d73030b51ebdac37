"""Sets of what belongs together: as if searched pair by pair."""

from hypothesis import given
from hypothesis import strategies as st

from fxpipe.utils.union_find import UnionFind

items = st.integers(0, 12)


@given(st.lists(st.tuples(items, items), max_size=20))
def test_what_is_united_stands_for_the_same(pairs: list[tuple[int, int]]) -> None:
    found, plain = UnionFind[int](), {item: {item} for item in range(13)}
    for one, other in pairs:
        found.unite(one, other)
        both = plain[one] | plain[other]
        plain |= dict.fromkeys(both, both)
    for one in range(13):
        assert found.find(one) in plain[one]
        assert {other for other in range(13) if found.find(other) == found.find(one)} == plain[one]
