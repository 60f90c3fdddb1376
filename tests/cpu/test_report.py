"""The report: one file, complete, and usable in a real browser by mouse and by keyboard, in light and in dark."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from autopar.plans.report import page
from autopar.plans.report.charts import memory_points, stream_blocks
from autopar.plans.report.tree import numbers
from tests.browser import browser
from tests.cpu.test_plan_views import CUT, IDS, Net


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(Net(), IDS, mesh={"dp": 2, "tp": 8}, cluster="dgx-h100", constraints=CUT, memory_budget="1GiB")


class Reader(HTMLParser):
    """Complains about tags that do not close, and collects texts and formulas."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.formulas: list[tuple[str, str]] = []
        self.sections: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.sections.append(given["id"])
        if "data-f" in given:
            self.formulas.append((given.get("class", ""), given["data-f"]))
        self.links += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_file_with_every_section_and_every_number_explained(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    found = Reader(text)
    assert found.sections == ["mesh", "model", "memory", "timeline", "collectives", "baselines", "planning"]
    assert all(link.startswith("#") for link in found.links)
    assert "http" not in text.replace("http-equiv", "")
    assert len(found.formulas) > 50
    assert all(formula for _, formula in found.formulas)
    assert "× 3" in text  # three alike blocks
    assert "node 1" in text


def test_the_drawn_memory_reaches_the_peak_and_the_blocks_fill_the_step(plan):
    assert max(sum(p.held.values()) for p in memory_points(plan)) == plan.peak_memory
    blocks = stream_blocks(plan)
    assert set(blocks) >= {"compute", "axis dp", "axis tp"}
    assert max(b.end_s for found in blocks.values() for b in found) == pytest.approx(plan.step_time)
    for found in blocks.values():
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(found, found[1:], strict=False))


def test_a_budget_far_above_is_not_drawn_and_a_missing_bound_is_no_gap(plan):
    def with_budget(times: int) -> Plan:
        options = {**plan.options, "memory_budget_bytes": times * plan.peak_memory}
        return dataclasses.replace(plan, options=options, lower_bound=0.0)

    near, far = with_budget(2), with_budget(1000)
    assert 'class="budget"' in page(near)
    assert 'class="budget"' not in page(far)
    assert ", far above" in page(far)
    assert "unknown" in page(far)
    assert "was not found in the time given" in str(far)


def test_a_plan_without_facts_or_collectives_has_a_report_too(plan):
    text = page(dataclasses.replace(plan, facts=None))
    assert Reader(text).sections[0] == "mesh"
    assert "saved in format 1" in text
    alone = autopar.plan(nn.Linear(4, 4), torch.zeros(2, 4), mesh=(1,), cluster="dgx-h100")
    assert "no rank sends anything" in page(alone)


def test_a_notebook_shows_the_table_and_the_report(plan):
    Reader(plan._repr_html_())
    assert "layer" in plan._repr_html_()


def test_numbers_of_layers_are_runs():
    assert numbers(["0", "1", "2", "5", "7", "8"]) == "0–2, 5, 7–8"


CONTRAST = """
const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
const lum = c => rgb(c).slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
function behind(e) { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (rgb(c).length === 3 || rgb(c)[3] > 0) return c; } return "rgb(255,255,255)"; }
return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() && !e.closest("svg, style, script") &&
  [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
  const a = lum(getComputedStyle(e).color), b = lum(behind(e));
  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName + "." + e.className + ": " + e.textContent];
}).filter(([ratio]) => ratio < 4.5).slice(0, 5);
"""
WIDER = """
return [document.scrollingElement.scrollWidth - innerWidth, [...document.querySelectorAll("body *")].filter(
  e => e.checkVisibility() && !e.closest(".scroll, svg") && e.getBoundingClientRect().right > innerWidth + 1
).slice(0, 5).map(e => e.tagName + "." + e.className)];
"""


def test_the_report_works_in_a_browser(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    with browser() as b:
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            b.screen(width, 900, dark=dark)
            b.open(tmp_path / "plan.html")
            b.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
            assert b.run(WIDER) == [0, []]
            assert b.run(CONTRAST) == []
            background = b.run("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") is not dark
        assert b.complaints() == []
        assert b.run("return performance.getEntriesByType('resource').length") == 0


def test_the_report_works_by_keyboard(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    with browser() as b:
        b.screen(1280, 900)
        b.open(tmp_path / "plan.html")
        b.press("Tab")  # the theme's button
        b.press("Enter")
        b.until("return document.documentElement.dataset.theme", "dark")
        b.press("Tab")
        assert b.run("return document.activeElement.className") == "n"
        assert b.run("return !document.getElementById('tip').hidden && document.getElementById('tip').textContent")
        b.press("Escape")
        assert b.run("return document.getElementById('tip').hidden")
        b.run("document.querySelector('.tree details details > summary').focus()")
        b.press("Enter")
        assert b.run("return document.querySelector('.tree details details').open")
        b.run("document.querySelector('button.axis').focus()")
        b.press("Enter")
        assert b.run("return [...document.querySelectorAll('.marked')].map(e => e.textContent)") == ["0", "8"]
        b.run("document.querySelector('svg.chart').focus()")
        b.press("Right")
        assert "parameters" in b.run("return document.querySelector('#memory .said').textContent")
        b.run("document.querySelector('svg.timeline').focus()")
        b.press("Right")
        assert "forward" in b.run("return document.querySelector('#timeline .said').textContent")
        assert b.complaints() == []
