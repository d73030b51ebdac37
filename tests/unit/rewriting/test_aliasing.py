"""From which node a stage makes again what shares its memory."""

from typing import Any

import torch
from helpers.layered import Layered

from fxpipe.rewriting.cut_points import Aliases, forbidden_cuts
from fxpipe.tracing import trace
from fxpipe.tracing.node_info import info
from fxpipe.tracing.traced import Traced


class Written(Layered, first=4, last=4):
    """`w` is a view of `v`, which is a view of `x`; `y` is `x`, changed in place."""

    def forward(self, h: torch.Tensor) -> Any:
        x = self.first(h)
        v = x[:, :3]
        w = v.unsqueeze(1)
        z = self.last(h)
        y = x.add_(1)
        w.mul_(2)
        return z + y, v, w


def traced_nodes() -> tuple[Traced, dict[str, Any]]:
    traced = trace(Written(), (torch.randn(6, 4),), chunks=2)
    x, v, w, _, y, *_ = traced.nodes
    return traced, {"x": x, "v": v, "w": w, "y": y}


def nearest(names: str) -> tuple[str, list[str]]:
    traced, nodes = traced_nodes()
    result = Aliases(traced.effects).nearest_root([nodes[name] for name in names])
    assert result is not None
    name_of = {node: name for name, node in nodes.items()}
    return name_of[result[0]], [name_of[node] for node in result[1]]


def test_what_is_alone_is_made_from_itself() -> None:
    assert [nearest(name) for name in "xvwy"] == [(name, []) for name in "xvwy"]


def test_a_view_is_made_from_the_nearest_that_is_there_and_not_from_the_first() -> None:
    assert nearest("vw") == ("v", ["w"])
    assert nearest("xv") == ("x", ["v"])


def test_several_are_made_from_what_they_have_in_common_each_after_its_source() -> None:
    assert nearest("wy") == ("x", ["v", "w", "y"])
    assert nearest("xw") == ("x", ["v", "w"])


def test_a_cut_through_views_that_can_be_made_again_is_allowed() -> None:
    traced, _ = traced_nodes()
    assert not forbidden_cuts(traced)


def test_what_may_be_a_copy_is_made_from_nothing() -> None:
    """For other strides, which another size may have, they copy."""

    class Shared(Layered):
        def forward(self, h: torch.Tensor) -> Any:
            x = h * 2
            r = self.share(x)
            x.add_(1)
            return x, r * 1

    for share in (lambda x: x.reshape(x.shape[0], 2, 2), lambda x: x.contiguous()):
        traced = trace(Shared(share=share), (torch.randn(6, 4),), chunks=2)
        x, r, *_ = (node for node in traced.nodes if node.op != "placeholder" and info(node).number is None)
        assert traced.effects.alias[x] == traced.effects.alias[r]
        assert Aliases(traced.effects).nearest_root([x, r]) is None


def test_what_is_used_for_the_last_time_before_a_cut_does_not_forbid_it() -> None:
    class UsedBefore(Layered, last=4):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            x = h * 2
            r = x.reshape(-1)
            s = r.exp().view(-1, 4)
            z = self.last(s)
            x.add_(1)
            return x + z

    traced = trace(UsedBefore(), (torch.randn(6, 4),), chunks=2)
    names = [node.name for node in traced.nodes]
    assert [names[place] for place in forbidden_cuts(traced)] == ["exp"]
