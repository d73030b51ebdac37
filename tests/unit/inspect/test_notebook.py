"""What notebooks show of plans, pipes, simulations and records; and what `print(pipe)` says before the model."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from helpers.drawn_plans import drawn_plan, portals_between
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.planning.tuning.candidates import CandidateResult, Tuning
from fxpipe.utils.units import human_seconds

EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Checks that elements end in the order in which they begin, and keeps what there is."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str]] = []  # of a tag, its name
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.handle_startendtag(tag, attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name) for name, _ in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def checked(html: str) -> Page:
    """A fragment that leaves the page around it alone."""
    page = Page(html)
    assert not {"script", "style", "link", "html", "body", "iframe", "img"} & {*page.tags}
    assert not [name for _, name in page.attributes if name.startswith("on") or name in ("id", "src", "href")]
    assert {tag for tag, name in page.attributes if name == "class"} <= {"g"}  # parts of a picture
    return page


def test_a_plan_is_its_tables():
    plan = drawn_plan(3, portals=portals_between(3, 25))
    plan = replace(plan, portals=(replace(plan.portals[0], name=EVIL, bytes=2**40), *plan.portals[1:]))
    page = checked(plan._repr_html_())
    assert page.tags.count("tr") == 1 + 3 + 1 + 20
    assert page.text.startswith("3 stages on 3 devices, ")
    assert EVIL in page.text
    assert "and 5 smaller portals" in page.text
    for stage in plan.stages:
        assert human_seconds(stage.forward_seconds) in page.text


def test_a_simulation_is_its_timeline_and_its_devices():
    simulation = fxpipe.simulate(drawn_plan(4, chunks=8), schedule="zero_bubble")
    page = checked(simulation._repr_html_())
    assert page.tags.count("svg") == 1
    assert page.tags.count("tr") == 1 + 4
    assert f"simulated step {human_seconds(simulation.step_seconds)}" in page.text
    assert page.text.count(f"{100 * simulation.bubble[2]:.1f} %") >= 1


def test_a_tuning_marks_what_it_chose():
    plan = drawn_plan(2)
    rows = tuple(
        CandidateResult("1f1b", 2**k, 1, plan=plan, step_seconds=2.0 + k, memory=(1.0, 2.0), lacks=k) for k in range(5)
    )
    page = checked(Tuning(rows[0], rows, 32, ("cpu", "cpu"))._repr_html_())
    assert page.tags.count("tr") == 1 + 5
    assert page.text.count("->") == 1
    assert page.text.count("lacks") == 1


class Layers(Layered, first=(4, 8), last=(8, 2)):
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.fixture
def pipe():
    with fxpipe.pipeline(Layers(), devices=["cpu", "cpu"], chunks=2, balance=[1, 2]) as made:
        yield made


def test_a_pipe_says_before_and_after_planning_what_it_is(pipe):
    before = repr(pipe)
    assert before.startswith(
        "Pipeline(\n  Layers on [cpu, cpu], 2 micro-batches, schedule 1f1b\n  the schedule is that of "
    )
    assert "no plan yet" in checked(pipe._repr_html_()).text
    loss = pipe.forward_backward(torch.randn(4, 4), target=torch.randn(4, 2), loss_fn=nn.functional.mse_loss)
    assert loss.ndim == 0
    _, head, _, first, second, *model = repr(pipe).splitlines()
    assert head == "  Layers on [cpu, cpu], 2 micro-batches, schedule 1f1b"
    assert first.startswith("  stage 0 on cpu: first, 1 node, 160 B, ")
    assert second.startswith("  stage 1 on cpu: relu – last, 2 nodes, 72 B, ")
    assert model[0].startswith("  (first): Linear")
    page = checked(pipe._repr_html_())
    assert "Layers on [cpu, cpu]" in page.text
    assert page.tags.count("tr") == 1 + 2
    step = checked(pipe.last_step._repr_html_())
    assert "2 stages, 2 micro-batches" in step.text
    assert "measured step" in step.text
    assert step.tags.count("svg") == 1
