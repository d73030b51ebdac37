"""In-place operations and views, cut at every allowed place: outputs and gradients are those of the plain model.

torchgpipe pins some of this as known to be wrong (its tests/test_inplace.py, strict xfails).
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.every_cut import EveryCut
from helpers.layered import Layered
from torch import nn

BATCH = 7  # in 3 chunks: 3, 2, 2


class Case(
    Layered,
    one=4,
    two=4,
    three=4,
    relu=lambda: nn.ReLU(inplace=True),
    count=lambda: torch.zeros(()),
    mean=lambda: torch.ones(4),
):
    """Three layers of 4 features; a subclass says what is done with them."""

    loose: tuple[str, ...] = ()  # weights whose gradient is summed in another order than in the plain model
    tolerance = 1e-5


class AddInto(Case):
    def forward(self, x):
        h = self.one(x)
        h += self.two(x)
        h += self.three(h * 1)
        return h * 2


class ReluOnASkip(Case):
    def forward(self, x):
        h = self.one(x)
        y = self.relu(h)
        z = self.two(y)
        return self.three(self.relu(z)) + h + y


class ReluAfterTheSkipWasRead(Case):
    def forward(self, x):
        h = self.one(x)
        a = self.two(x) + h
        h.relu_()
        return self.three(a) * h + a


class Slices(Case):
    def forward(self, x):
        h = self.one(x)
        h[:, 0] = 0
        y = self.two(x)
        h[..., ::2] += y[..., ::2]
        h[h > 0.5] = 0.5
        h[:, 3:] = y[:, :1]
        return self.three(h) + h


class Inputs(Case):
    def forward(self, x):
        y = self.one(x * 1)
        x.mul_(2)
        y = y + self.two(x * 1)
        x += 1
        x[:, 0] = 0
        return self.three(y) + x


class Views(Case):
    loose = ("one.weight", "one.bias")  # after the write to `h` autograd makes its views anew, as late as they are used

    def forward(self, x):
        h = self.one(x)
        v = h.view(-1, 2, 2)
        t = v.transpose(1, 2)
        y = self.two(x)
        t[:, 0] += 1
        v.mul_(3)
        z = self.three(y + h)
        h.sub_(1)
        return z + h, v + t, t.reshape(-1, 4) * z


class OnlyAViewIsUsed(Case):
    def forward(self, x):
        h = self.one(x)
        v = h[:, :3].t()
        y = self.two(x)
        v.mul_(2)
        y = self.three(y)
        v += 1
        return v.t() + y[:, :3]


class TwoViews(Case):
    def forward(self, x):
        h = self.one(x)
        left, right = h[:, :3], h[:, 1:]
        y = self.two(x)
        left.mul_(2)
        y = self.three(y)
        right.add_(1)
        return left + right + y[:, :3]


class ChunksOfAnInput(Case):
    def forward(self, x):
        a, b = x.chunk(2, 1)
        y = self.one(x * 1)
        a.add_(1)
        y = self.two(y + x)
        b.mul_(a)
        return self.three(y) + x, a + b


class Chain(Case):
    def forward(self, x):
        h = self.one(x)
        first = h.view(-1)
        for layer in (self.two, self.three):
            y = torch.tanh(layer(h * 1))
            h += y.t().contiguous().t()
            h.mul_(1.5)
        h -= 1
        return h * first.view(h.shape).sum(1, keepdim=True)


class NotDifferentiable(Case):
    """A write to what needs no gradient goes unnoticed by autograd: done twice, it is silently wrong."""

    def forward(self, x, mask):
        y = self.one(x)
        mask.add_(1)
        y = y + mask
        mask.add_(1)
        return self.two(y) * mask


class UnderNoGrad(Case):
    def forward(self, x):
        h = self.one(x)
        with torch.no_grad():
            m = self.two(h).abs()
            m.clamp_(max=1)
            h.mul_(2)
            m.add_(h)
            p = self.three.weight.t()
            with torch.enable_grad():
                k = torch.sigmoid(h)
            k2 = k * 2
        return self.three(h) * m + k * k2 + h @ p


class UnderAutocast(Case):
    loose = ("one.weight", "one.bias", "two.weight", "two.bias")  # used twice: their casts are not shared
    tolerance = 2e-2

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.one(x)
            h = self.relu(h)
            y = self.two(h)
            y += h
            with torch.autocast("cpu", enabled=False):
                z = self.three(y.float())
                z.relu_()
            y = self.one(z) + self.two(z)
        return y.float() + z


class Detached(Case):
    def forward(self, x):
        h = self.one(x)
        d = h.detach()
        y = self.two(x)
        d.add_(1)
        z = self.three(y)
        d.data.mul_(2)
        return h + z, d


class FilledUp(Case):
    def forward(self, x):
        out = x.new_zeros(x.shape[0], 8)
        a = self.one(x)
        out[:, :4] = a
        b = self.two(a)
        out[:, 4:].copy_(b)
        out.narrow(1, 3, 2).zero_()
        return self.three(out[:, 2:6]) + out[:, :4]


class MaximaChanged(Case):
    def forward(self, x):
        h = self.one(x)
        values, indices = h.max(1)
        y = self.two(h)
        values.mul_(2)
        return self.three(y) + values[:, None] + indices[:, None]


class Buffers(Case):
    def forward(self, x):
        h = self.one(x)
        self.count.add_(1)
        h = self.two(h) * self.count.clone()
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        y = self.three(h) - self.mean
        y.relu_()
        return y


class ContiguousCopies(Case):
    """`part` has gaps, so `c` is a copy; a dense clone of `part` would make it the same tensor."""

    def forward(self, x):
        h = self.one(x)
        part = h[:, :3]
        y = self.two(x)
        part.mul_(2)
        c = part.contiguous()
        c.add_(1)
        z = self.three(y)
        part.sub_(1)
        d = part.contiguous()
        d.mul_(3)
        return z[:, :3] + part, c + d


class ContiguousEarlier(Case):
    def forward(self, x):
        part = self.one(x)[:, :3]
        c = part.contiguous()
        part.mul_(2)
        y = self.two(x)
        c.add_(1)
        part.mul_(3)
        return y[:, :3] + part * c


class Reshaped(Case):
    def forward(self, x):
        h = self.one(x)
        r = h.reshape(-1)
        y = self.two(x)
        h.mul_(2)
        r.add_(1)
        return self.three(y) + h, r.view(-1, 4)


class Reshapes(Case):
    """Metadata changes in place."""

    def forward(self, x):
        h = self.one(x)
        g = h.unsqueeze_(1)
        y = self.two(x)
        h.squeeze_(1)
        y = self.three(y)
        g.add_(1)
        return h + y


class Expanded(Case):
    def forward(self, x):
        b = self.one(x).mean(1, keepdim=True)
        e = b.expand(-1, 4)
        y = self.two(x)
        b.add_(y[:, :1])
        return self.three(y) + e, b


class Dropped(Case):
    def forward(self, x):
        h = self.one(x)
        F.dropout(h, 0.5, self.training, inplace=True)
        y = self.two(x)
        h.add_(torch.rand_like(h))
        return self.three(F.dropout(y, 0.3, self.training)) + h


class DetachedInput(Case):
    """What is written to a detached view has a gradient; what it is a view of has none."""

    def forward(self, x):
        h, d = self.one(x * 1), x.detach()
        d[:, ::2] += h[:, 1::2]
        return self.two(d * 1).relu() + d + self.three(x * 1)


class DetachedTwice(Case):
    """Two gradients in the same memory."""

    def forward(self, x):
        h, y = self.one(x), self.two(x)
        d = h.detach()
        d[:, 0] = y[:, 0]
        z = d.sigmoid()
        d.mul_(0.5)
        return self.three(z) + d + h * 2


class OutArgument(Case):
    def forward(self, x):
        h = self.one(x)
        with torch.no_grad():
            mask = torch.empty_like(h)
            other = mask.view(-1)
            torch.add(h, 1, out=mask)
            y = self.two(x).abs()
            torch.mul(mask, y, out=mask)
        return self.three(h) * mask + other.view(-1, 4)


class ViewAsAnother(Case):
    """What is written to elsewhere has a view there that takes its size from what nothing else there uses."""

    def forward(self, x):
        h, y = self.one(x), self.two(x)
        view = h.view_as(y)
        return self.three(h.add_(1)) + view


class ViewWithoutGradients(Case):
    """The view says that it requires grad, as its base does, and no gradient goes in there."""

    def forward(self, x):
        h, state = self.one(x), torch.zeros_like(x)
        with torch.no_grad():
            view = h[:, 1:]
            state[:, 1:] += view
        return self.three(self.relu(self.two(h))) + state


def every_cut(case: type[Case]) -> EveryCut:
    x = torch.randn(BATCH, 4)
    args = (x, torch.ones(BATCH, 4)) if case is NotDifferentiable else (x,)
    return EveryCut(case(), *args, loose=case.loose, tolerance=case.tolerance)


RUNS = list(itertools.product((1, 3), ("drop-in", "1f1b", "gpipe"), ("never", "always")))


@pytest.mark.parametrize("case", Case.__subclasses__(), ids=lambda case: case.__name__)
def test_cut_anywhere_it_is_the_plain_model(case):
    model = every_cut(case)
    cuts = [*model.cuts(2), *model.cuts(3, every=5), tuple([0, *model.allowed])]
    assert len(cuts) > 3
    for number, starts in enumerate(cuts):
        for chunks, schedule, checkpoint in RUNS[number % 4 :: 4]:
            model.check(starts, chunks, schedule, checkpoint, seed=number)


@pytest.mark.parametrize("case", [AddInto, ContiguousCopies, Views], ids=lambda case: case.__name__)
def test_a_stage_clones_only_what_it_writes_to(case):
    model = every_cut(case)
    for starts in model.cuts(2):
        program = model.program(starts)
        for stage, (start, end) in zip(program.stages, zip(starts, (*starts[1:], None), strict=True), strict=True):
            written = set().union(*model.traced.effects.written_classes[start:end])
            clones = [n for n in stage.run.graph.nodes if getattr(n.target, "__name__", "") == "clone"]
            assert len(clones) <= len(written)
