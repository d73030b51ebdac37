"""Reports in a real browser: what a person sees, and that nothing is fetched, broken or cut off."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.drawn_plans import drawn_plan, portals_between

import fxpipe
from fxpipe.inspect.report import save_report
from fxpipe.inspect.step_summary import outcome_of
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import OpaqueNode, TiedParameter
from fxpipe.utils.units import human_bytes, human_seconds

EVIL = "<script>document.title = 'run'</script>\"'&<img src=x onerror=alert(1)>"
WIDE, NARROW = 1280, 400


def plan_with_everything() -> Plan:
    plan = drawn_plan(5, blocks=3, portals=portals_between(5, 30), chunks=4, batch=16)
    stages = tuple(
        replace(
            stage,
            modules=(EVIL, *stage.modules[1:]),
            nodes=(f"evil_{stage.index}", *stage.nodes[1:]),
            code=f"def stage_{stage.index}(x):\n    # {EVIL}\n    return " + "x + " * 200 + "x",
        )
        for stage in plan.stages
    )
    portals = (*plan.portals, replace(plan.portals[0], name=EVIL, line=EVIL))
    return replace(
        plan,
        stages=stages,
        portals=portals,
        tied=(TiedParameter(("wte.weight", EVIL), (0, 4), 2**20),),
        whole=(OpaqueNode(EVIL, EVIL, EVIL),),
        guards=(EVIL,),
        why=(EVIL,),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_with_everything()


@pytest.fixture(scope="module")
def report(plan: Plan, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    save_report(plan, path, title=EVIL, sweep=[outcome_of(n, "1f1b", drawn_plan(n)) for n in (1, 2, 4)])
    return path


@contextmanager
def opened(browser, path: Path, width: int = WIDE, **options) -> Iterator:
    """The page; when it closes, nothing may have been asked for but the file, and nothing may have gone wrong."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.goto(path.as_uri())
    yield page
    assert asked == [path.as_uri()]
    assert wrong == []
    context.close()


def column(page, table: str, header: str) -> list[str]:
    return page.evaluate(
        """([label, header]) => {
            const table = document.querySelector(`[aria-label="${label}"] table`);
            const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === header);
            return [...table.tBodies[0].rows].map((row) => row.cells[place].firstChild.textContent);
        }""",
        [table, header],
    )


def bytes_of(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+) (\w+)", text).groups()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def test_figures_are_of_the_simulated_step(browser, report, plan):
    simulation = fxpipe.simulate(plan)
    with opened(browser, report) as page:
        boxes = page.locator("#step .facts div")
        texts = [
            boxes.nth(k).evaluate("e => [e.children[0].textContent, e.children[1].firstChild.textContent]")
            for k in range(boxes.count())
        ]
        found = {name: value for name, value in texts}
        assert found["Step"] == human_seconds(simulation.step_seconds)
        assert found["Bubble"] == f"{100 * simulation.mean_bubble:.1f} %"
        assert found["Most memory"] == human_bytes(max(memory.peak for memory in simulation.memory))


def test_without_scripts_there_is_every_table(browser, report):
    with opened(browser, report, java_script_enabled=False) as page:
        for label in ("stages", "portals", "schedules", "devices"):
            assert page.locator(f'[aria-label="{label}"] table:visible').count() >= 1, label
        assert page.locator("th button").count() == 0
        for label in ("timeline", "graph"):
            assert page.locator(f'figure[aria-label="{label}"] svg:visible').count() == 1, label
        page.locator("summary", has_text="Stage 2").click()
        assert page.locator("pre:visible").inner_text().startswith("def stage_2(x):")


def test_columns_sort_by_their_numbers_by_mouse_and_by_keys(browser, report, plan):
    with opened(browser, report) as page:
        assert column(page, "portals", "bytes") == [human_bytes(portal.bytes) for portal in plan.portals]
        header = page.locator('[aria-label="portals"] th', has_text=re.compile("^bytes$"))
        assert header.get_attribute("aria-sort") == "none"
        button = header.locator("button")
        button.click()
        assert header.get_attribute("aria-sort") == "descending"
        found = column(page, "portals", "bytes")
        assert len({text.split()[1] for text in found}) > 1  # a comparison of text would not do
        assert [bytes_of(text) for text in found] == sorted(map(bytes_of, found), reverse=True)
        assert found == [human_bytes(size) for size in sorted((p.bytes for p in plan.portals), reverse=True)]
        button.focus()
        page.keyboard.press("Enter")
        assert header.get_attribute("aria-sort") == "ascending"
        assert column(page, "portals", "bytes") == found[::-1]
        names = page.locator('[aria-label="portals"] th', has_text=re.compile("^portal$"))
        names.locator("button").focus()
        page.keyboard.press("Space")
        assert names.get_attribute("aria-sort") == "ascending"
        assert header.get_attribute("aria-sort") == "none"
        numbers = [int(name.split("_")[1]) for name in column(page, "portals", "portal") if name.startswith("features")]
        assert numbers == sorted(numbers)  # 2 before 10

        sends = page.locator('[aria-label="stages"] th', has_text=re.compile("^sends$")).locator("button")
        sends.click()
        assert column(page, "stages", "sends")[-1] == "–"  # below all numbers
        sends.click()
        assert column(page, "stages", "sends")[0] == "–"


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_all_is_legible(browser, report, width, scheme):
    with opened(browser, report, width, color_scheme=scheme) as page:
        for details in page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink))
        assert (light > dark) == (scheme == "light")
        assert abs(light - dark) > 450  # of 765
        cut_off = page.evaluate(
            """() => [...document.querySelectorAll("h1, h2, h3, p, li, dt, dd, summary")]
                .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
        )
        assert cut_off == []


def test_hostile_names_are_text(browser, report):
    with opened(browser, report) as page:
        assert page.title().startswith(EVIL)
        assert page.locator("h1").inner_text() == EVIL
        assert page.locator("script:not([type])").count() == 1
        assert page.locator("img").count() == 0
        page.locator("summary", has_text="Stage 1").click()
        assert EVIL in page.locator("pre:visible").inner_text()
        assert EVIL in column(page, "portals", "portal")
        assert page.locator("#facts li", has_text="onerror").count() >= 4


def test_every_link_leads_to_a_part_of_the_page(browser, report):
    with opened(browser, report) as page:
        targets = page.evaluate("[...document.querySelectorAll('nav a')].map((a) => a.getAttribute('href'))")
        assert len(targets) >= 8
        assert page.evaluate("(all) => all.every((one) => document.querySelector(one))", targets)


def test_on_paper_all_rows_are_there(browser, report):
    with opened(browser, report, 760) as page:
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") <= 760
        assert not page.locator("nav").is_visible()
        assert page.locator('[aria-label="portals"]').evaluate("e => e.scrollHeight <= e.clientHeight + 1")
