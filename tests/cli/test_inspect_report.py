"""Reports and graphs as files: what they hold, and what is refused."""

import re
from dataclasses import replace

import pytest
from helpers.drawn_plans import dense_portals, drawn_plan, portals_between

import fxpipe
from fxpipe.inspect.report import report_page
from fxpipe.inspect.step_summary import outcome_of, schedule_outcomes
from fxpipe.scheduling import make_schedule
from fxpipe.utils.units import human_seconds


@pytest.mark.parametrize(
    "plan",
    [
        drawn_plan(1),
        drawn_plan(2, chunks=1, batch=1),
        drawn_plan(4, placement=(0, 1, 1, 0), schedule="zbv"),
        drawn_plan(6, portals=dense_portals(6)),
        drawn_plan(3, schedule=str(make_schedule("gpipe", 3, 8))),
    ],
    ids=["one stage", "one sample", "zbv", "dense", "own schedule"],
)
def test_any_plan_has_a_report(plan):
    text = report_page(plan)
    assert text.count("<section") == text.count("</section>") >= 6
    assert text.count('aria-label="timeline"') == 1
    for stage in plan.stages:
        assert f"def stage_{stage.index}(x):" in text


def test_a_report_fetches_nothing():
    text = report_page(drawn_plan(3, portals=portals_between(3, 3)))
    assert "default-src 'none'" in text
    addresses = {found for found in re.findall(r"https?://[^\s\"'<)]+", text)}
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a language, not an address
    assert not re.search(r"\b(src|href)=\"(?!#)", text)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_schedules_are_compared_and_those_that_cannot_be_say_why():
    plan = drawn_plan(4)
    found = {one.schedule: one for one in schedule_outcomes(plan)}
    for name in ("gpipe", "1f1b", "zero_bubble", "zero_bubble_2p"):
        run = found[name].run
        assert run is not None
        assert run.step_seconds == fxpipe.simulate(plan, schedule=name).step_seconds
    assert found["zbv"].run is None
    assert found["zbv"].problem == "needs a plan with stages_per_device=2"
    assert "inference" not in found


def test_a_sweep_is_a_table_of_devices():
    rows = [outcome_of(n, "1f1b", drawn_plan(n)) for n in (1, 2, 4)]
    text = report_page(drawn_plan(4), sweep=rows)
    part = text[text.index('<section id="devices">') :].partition("</section>")[0]
    steps = re.findall(r'<td class="number(?: marked)?" data-value="[^"]+">([\d.]+ m?s)</td>', part)
    assert steps == [human_seconds(fxpipe.simulate(drawn_plan(n)).step_seconds) for n in (1, 2, 4)]


def test_what_does_not_fit_is_told():
    plan = drawn_plan(2)
    small = replace(plan, stages=tuple(replace(stage, memory_limit=2**20) for stage in plan.stages))
    assert '<dd class="warn">' not in report_page(
        replace(plan, stages=tuple(replace(s, memory_limit=None) for s in plan.stages))
    )
    assert '<dd class="warn">' in report_page(small)
