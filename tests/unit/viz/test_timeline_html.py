"""The page of a timeline in a real browser: it loads nothing, its axis zooms and moves, the tip tells of actions."""

from __future__ import annotations

import re

import pytest
from helpers.drawn_steps import simulated

INSIDE = """() => [...document.querySelectorAll('g.names text')].filter(text => {
  const data = JSON.parse(document.querySelector('figure script').textContent);
  const box = text.getBBox();
  return box.x < data.left - 1 || box.x + box.width > data.right + 1;
}).map(text => text.textContent)"""


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a step; at the end nothing has gone wrong in it, and nothing was fetched."""
    page = browser.new_page(viewport={"width": 1300, "height": 700})
    wrong, fetched = [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("request", lambda request: fetched.append(request.url))

    def open_page(found):
        found.save_timeline(tmp_path / "step.html")
        page.goto((tmp_path / "step.html").as_uri())
        return page

    yield open_page
    page.close()
    assert wrong == []
    assert [url for url in fetched if not url.startswith("file:")] == []
    assert len(fetched) == 1


def _names(page) -> list[str]:
    return page.locator("g.names text").all_text_contents()


def _point(page, across: float, row: int) -> tuple[float, float]:
    """In the window: of a share of the step, in the middle of a device's row."""
    data = page.evaluate("() => JSON.parse(document.querySelector('figure script').textContent)")
    box = page.locator("figure > svg").bounding_box()
    scale = box["width"] / data["width"]
    x = data["left"] + across * (data["right"] - data["left"])
    y = data["top"] + row * data["pitch"] + data["height"] / 2
    return box["x"] + x * scale, box["y"] + y * scale


def _ticks(page) -> list[float]:
    return [float(text.split()[0]) for text in page.locator("g.ticks text").all_text_contents()]


def test_the_wheel_zooms_where_the_pointer_is_and_a_double_click_shows_all(opened):
    found = simulated("zbv", 8, 16, per_device=2)
    page = opened(found)
    whole, drawn = _names(page), page.locator("g.names").inner_html()
    page.mouse.move(*_point(page, 0.25, 3))
    for _ in range(3):
        page.mouse.wheel(0, -500)
        page.wait_for_timeout(50)
    assert page.locator("figure.zoomed").count() == 1
    assert _names(page)
    assert _names(page) != whole
    assert set(_names(page)) <= {str(span.action) for span in found.spans}
    assert page.evaluate(INSIDE) == [], "names stay inside"
    ticks = _ticks(page)
    quarter = found.step_seconds * 0.25e3  # milliseconds
    assert ticks[0] < quarter < ticks[-1], "what was below the pointer stays there"
    assert ticks[-1] - ticks[0] < 0.2 * found.step_seconds * 1e3
    page.mouse.dblclick(*_point(page, 0.25, 3))
    assert page.locator("figure.zoomed").count() == 0
    assert page.locator("g.names").inner_html() == drawn


def test_dragging_and_keys_move_the_axis_within_the_step(opened):
    page = opened(simulated("1f1b", 4, 8))
    page.locator("figure").focus()
    for _ in range(4):
        page.keyboard.press("+")
    before = _ticks(page)
    x, y = _point(page, 0.5, 1)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 200, y)
    page.mouse.up()
    moved = _ticks(page)
    assert moved[0] > before[0]
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    assert _ticks(page)[0] == 0, "no further than the step's beginning"
    page.keyboard.press("0")
    assert page.locator("figure.zoomed").count() == 0


def test_the_tip_tells_of_the_action_below_the_pointer_and_of_no_bubble(opened):
    found = simulated("1f1b", 2, 4, overlaps=False)
    page = opened(found)
    span = next(one for one in found.spans if str(one.action) == "1B2")
    page.mouse.move(*_point(page, (span.start + span.end) / 2 / found.step_seconds, 1))
    tip = page.locator(".tip")
    assert re.fullmatch(r"backward, stage 1, micro-batch 2: [\d.]+ ms from [\d.]+ ms", tip.inner_text())
    page.mouse.move(*_point(page, 0.99, 1))
    assert tip.is_hidden()


def test_a_step_of_more_actions_than_boxes_can_be_zoomed_to_their_names(opened):
    page = opened(simulated("1f1b", 64, 40))
    assert _names(page) == []
    page.mouse.move(*_point(page, 0.5, 2))
    for _ in range(4):
        page.mouse.wheel(0, -500)
        page.wait_for_timeout(30)
    names = _names(page)
    assert len(names) > 40
    assert all(re.fullmatch(r"[FB]\d+", name) for name in names)


def test_a_step_without_time_is_a_page_too(opened):
    page = opened(simulated("1f1b", 2, 2, unit=0))
    page.mouse.move(*_point(page, 0.5, 0))
    page.mouse.wheel(0, -500)
    assert page.locator("figure.zoomed").count() == 0
