"""Every value comes to all ranks that use it before they do, every gradient to where it is for; no more is sent."""

import itertools

import pytest

from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.rewriting.relay_routes import relay_routes

PLACEMENTS = [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)]


def value_cuts(users, placement):
    """Who has the value `(source, "v")` when each stage runs forward; the last user may be the loss, stage n."""
    ((source, _),) = users
    routes = relay_routes(users, placement)
    key = (source, "v")
    ranks = {routes.rank(source)}
    for stage in range(max(source, 0), len(placement)):
        if stage > max(source, 0) and key in routes.down[stage - 1] and routes.crosses(stage - 1):
            assert placement[stage - 1] in ranks, "a rank relays what it does not have"
            assert placement[stage] not in ranks, "a rank is sent what it has"
            ranks.add(placement[stage])
        if stage in users[key] or (stage == len(placement) - 1 and len(placement) in users[key]):
            assert placement[stage] in ranks
    return routes


def all_users(n):
    for source in range(PIPE_INPUT, n):
        later = range(max(source + 1, 0), n + 1)
        for count in (1, 2, 3):
            for users in itertools.combinations(later, count):
                yield {(source, "v"): users}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_are_where_they_are_used(placement):
    for users in all_users(len(placement)):
        value_cuts(users, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_come_to_the_stage_that_they_are_for(placement):
    n = len(placement)
    for users in all_users(n):
        ((source, _),) = users
        routes = relay_routes(users, placement)
        for target, user in itertools.pairwise([source, *users[source, "v"]]):
            at, visited = routes.rank(user), [routes.rank(user)]
            for cut in range(min(user, n - 1) - 1, max(target, 0) - 1, -1):
                if (source, "v", target) in routes.up[cut]:
                    assert at == placement[cut + 1], "a rank relays what it does not have"
                    at = placement[cut]
                    visited.append(at)
            assert at == routes.rank(target)
            assert len(visited) == len({*visited}), "a rank is sent what it had"
