"""Reports in a browser."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.recording.report import write_report
from tests.support.browser import browser as browser
from tests.support.browser import needs_chromium, opened
from tests.support.synthetic_runs import CASES, Scenario, write_run

pytestmark = needs_chromium
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run"), CASES["tail"]))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (700, True)])
def test_a_report_opens_without_an_error_or_a_request(browser: Any, report: Path, width: int, dark: bool) -> None:
    with opened(browser, report, width=width, dark=dark) as page:
        assert page.locator("#sentence").inner_text().startswith("The long tail bounds this run")
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("section").count() >= 7
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")


def test_the_timeline_answers_clicks_and_zooms(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        canvas, detail = page.locator("#timeline"), page.locator("#timeline-detail")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        canvas.click(position={"x": box["width"] / 2, "y": 40})
        assert "trainer at" in detail.inner_text()
        assert "in step" in detail.inner_text()
        canvas.click(position={"x": box["width"] / 2, "y": box["height"] - 80})
        assert "rollout-1 at" in detail.inner_text()
        ticks = page.locator(".time-axis").inner_text()
        page.get_by_role("button", name="zoom in").click()
        page.wait_for_function("before => document.querySelector('.time-axis').innerText !== before", arg=ticks)
        page.get_by_role("button", name="show the whole run").click()
        page.wait_for_function("before => document.querySelector('.time-axis').innerText === before", arg=ticks)


def test_long_answers_can_be_clicked(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        canvas, detail = page.locator("#timeline"), page.locator("#timeline-detail")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        told = set[str]()
        for x in range(110, int(box["width"]), 60):
            canvas.click(position={"x": x, "y": box["height"] - 10 - 36})
            told.add(detail.inner_text())
        assert any("tokens in" in text and "trained" in text for text in told)


def test_the_sample_viewer_answers_clicks(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        first = page.locator("#sample-view").inner_text()
        page.locator("#sample-list li").nth(3).click()
        second = page.locator("#sample-view").inner_text()
        assert second != first
        page.get_by_role("button", name="longest").click()
        assert page.locator("#sample-view").inner_text() not in (first, second)
        assert page.locator(".tokens .v0").count() > 100
        page.get_by_role("button", name="log-probability").click()
        assert page.locator(".tokens .v0").count() == 0
        assert page.locator(".tokens .l4").count() > 0


def test_a_script_in_an_answer_stays_text(browser: Any, tmp_path: Path) -> None:
    scenario = Scenario(steps=2, text=HOSTILE, status="failed", error=HOSTILE)
    with opened(browser, write_report(write_run(tmp_path, scenario))) as page:
        assert page.locator(".tokens").inner_text() == HOSTILE
        assert page.locator(".trouble").inner_text() == HOSTILE
        assert page.locator("main img, main b:text-is('bold'), main script").count() == 0
        assert "script-src 'sha256-" in page.locator("meta[http-equiv]").get_attribute("content")


def test_reports_of_broken_runs_open(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path, Scenario(steps=1))
    for name in ("events.jsonl", "metrics.parquet", "summary.json"):
        (run / name).unlink()
    with opened(browser, write_report(run)) as page:
        assert page.locator("#sentence").inner_text().startswith("No step is finished yet")
        assert page.locator("#sample-list li").count() > 0
