"""A traced and profiled graph in plain numbers: what partitioning goes by (`fxpipe.partitioning.chain`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from fxpipe.partitioning.chain import Chain, Flow, Held, Weights
from fxpipe.profiling import Profile
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.containers import bytes_in
from fxpipe.tracing.sizing.shapes import bytes_for, bytes_of
from fxpipe.tracing.traced import Traced, lookup


def chain_of(
    traced: Traced,
    profiles: Sequence[Profile],
    samples: int,
    forbidden: Mapping[int, str],
    copied: Iterable[fx.Node] = (),
) -> Chain:
    """The graph for micro-batches of so many samples.

    Args:
        traced: the order of its nodes gives the places.
        profiles: one for each kind of device, of the same nodes in any order.
        samples: of the largest micro-batch.
        forbidden: place -> why no cut may stand before it.
        copied: nodes that a stage makes for itself rather than receive.
    """
    effects = traced.effects
    assert effects is not None
    costs = [{cost.name: cost for cost in profile.nodes} for profile in profiles]
    by_place = [[of[node.name] for node in effects.nodes] for of in costs]
    place = {node.name: p for node, p in effects.place.items()}
    profiled = [place[cost.name] for cost in profiles[0].nodes]  # place in the profile -> place here

    def held_at(number: int) -> int:
        return -1 if number < 0 else profiled[number]

    return Chain(
        forward=tuple(tuple(cost.forward.at(samples) for cost in row) for row in by_place),
        backward=tuple(tuple(cost.backward.at(samples) for cost in row) for row in by_place),
        flows=tuple(_flows(traced, effects, samples, frozenset(copied))),
        held=tuple(
            Held(
                bytes_for(saved.bytes, traced.batch, samples),
                held_at(saved.maker),
                tuple(sorted(map(held_at, saved.savers))),
            )
            for saved in profiles[0].saved
        ),
        weights=tuple(_weights(traced, effects)),
        working=tuple(bytes_for(cost.working_bytes, traced.batch, samples) for cost in by_place[0]),
        forbidden=forbidden,
    )


def _flows(traced: Traced, effects: Effects, samples: int, copied: frozenset[fx.Node]) -> Iterable[Flow]:
    outputs = {
        o for o in (*traced.handed_out, *effects.written_inputs, *traced.left.values()) if isinstance(o, fx.Node)
    }
    with_gradient = {effects.alias[node] for node, requires_grad in effects.requires_grad.items() if requires_grad}
    for node, place in effects.place.items():
        maker, returns = place, effects.requires_grad.get(node, False)
        users = sorted(effects.place[user] for user in node.users if user in effects.place)
        if node in outputs:
            users.append(len(effects.nodes))
        if maker < 0 and (writer := _first_writer(effects, node)) is not None:
            # An input that forward writes to is a value of the stage that does so, which writes to a clone.
            maker, returns, users = writer, effects.alias[node] in with_gradient, [u for u in users if u > writer]
        if users and node not in copied:
            size = bytes_for(bytes_of(node.meta.get("shapes", ())), traced.batch, samples)
            yield Flow(size, maker, tuple(users), returns)


def _first_writer(effects: Effects, node: fx.Node) -> int | None:
    """The place of the first node that changes a value."""
    alias = effects.alias[node]
    return next((place for place, classes in enumerate(effects.writes) if alias in classes), None)


def _weights(traced: Traced, effects: Effects) -> Iterable[Weights]:
    for node in traced.graph.nodes:
        users = sorted(effects.place[user] for user in node.users if user in effects.place)
        if node.op == "get_attr" and users:
            tensor = lookup(traced, node)
            yield Weights(bytes_in(tensor), tuple(users), tensor.requires_grad)
