"""The page of real runs in a real browser: what it does, and that it can be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelong.report import read_runs, write_report
from scalelong.stability import OscillationProbe
from scalelong.training import Trainer
from tests.training.tiny import tiny

pytestmark = pytest.mark.slow

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three real runs of 24 steps, with grids at every eighth."""
    out = tmp_path_factory.mktemp("runs")
    for method in ("none", "cs", "ls"):
        config = tiny(scaling_method=method, training_steps=24, training_sample_every=8, model_depth=6)
        trainer = Trainer(config, out / method)
        trainer.observers.append(OscillationProbe(trainer.model, trainer.probe_inputs(), every=1))
        trainer.run()
        with (out / method / "metrics.jsonl").open("a") as file:
            file.write('{"step": 24, "kind": "evaluation", "metric": "FID", "value": 9.5, "n": 10, "extractor": "x"}\n')
    return write_report(read_runs([out])[0], out / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as started:
        try:
            launched = started.chromium.launch(executable_path=program, args=FLAGS)
        except playwright.Error as error:
            if program:
                raise
            pytest.skip(f"no Chromium here; apt-get install chromium, or playwright install chromium: {error}")
        yield launched
        launched.close()


class Visit:
    """A page opened offline, with everything it complained about or asked for."""

    def __init__(self, browser: Any, report: Path, viewport: dict[str, int], scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("#chart-throughput svg")


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Any]:
    opened: list[Visit] = []

    def open_page(viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Visit:
        opened.append(Visit(browser, report, viewport, scheme))
        return opened[-1]

    yield open_page
    for one in opened:
        one.context.close()
        assert one.complaints == []


def test_it_loads_without_complaint_and_asks_for_nothing(visit: Any, report: Path) -> None:
    opened = visit()
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]
    charts = opened.page.locator(".chart")
    assert charts.count() == 11
    for i in range(charts.count()):
        assert charts.nth(i).locator("svg path.main").count() == 3


def test_a_method_can_be_switched_off_and_on(visit: Any) -> None:
    page = visit().page
    button = page.get_by_role("button", name="cs 0.7")
    curve = page.locator('#chart-loss-steps .curve[data-group="1"]')
    film = page.locator('.film[data-group="1"]')
    assert (curve.count(), film.is_visible(), button.get_attribute("aria-pressed")) == (1, True, "true")
    button.click()
    assert (curve.count(), film.is_visible(), button.get_attribute("aria-pressed")) == (0, False, "false")
    assert page.locator("#chart-loss-steps .curve").count() == 2
    button.press("Enter")
    assert (curve.count(), film.is_visible()) == (1, True)


def test_with_every_method_off_the_charts_say_so(visit: Any) -> None:
    page = visit().page
    for button in page.locator("button.method").all():
        button.click()
    page.locator("#chart-loss-steps").hover()
    assert page.locator("#chart-loss-steps").inner_text().strip() == "every method is switched off"


def test_the_slider_changes_the_image(visit: Any) -> None:
    page = visit().page
    slider = page.get_by_label("Training", exact=True)
    seen = page.locator('.film[data-group="2"] img:visible')
    assert seen.get_attribute("data-step") == "24"
    last = seen.get_attribute("src")
    slider.press("ArrowLeft")
    assert seen.count() == 1
    assert seen.get_attribute("data-step") == "16"
    assert seen.get_attribute("src") != last
    assert slider.get_attribute("aria-valuetext") == page.locator("#film-now").inner_text() == "step 16"


def test_values_can_be_read_with_the_pointer_and_with_the_keys(visit: Any) -> None:
    page = visit().page
    chart = page.locator("#chart-loss-steps")
    readout = chart.get_by_role("status")
    chart.hover(position={"x": 300, "y": 100})
    text = readout.inner_text()
    assert text.startswith("step ")
    assert all(name in text for name in ("none", "cs 0.7", "ls"))
    page.mouse.move(5, 5)
    assert not readout.is_visible()
    chart.press("End")
    assert readout.inner_text().startswith("step 24")
    chart.press("ArrowLeft")
    assert readout.inner_text().startswith("step 23")
    chart.press("Escape")
    assert not readout.is_visible()


def test_another_block_draws_other_curves(visit: Any) -> None:
    page = visit().page
    curve = page.locator("#chart-norm-steps path.main").first
    before = curve.get_attribute("d")
    page.get_by_label("Block", exact=True).select_option("out_blocks.2")
    assert curve.get_attribute("d") != before


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(visit: Any, width: int) -> None:
    page = visit({"width": width, "height": 844}).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width


CONTRASTS = """() => {
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = (rgb) => { const [r, g, b] = rgb.match(/[0-9.]+/g).map(Number).map(light);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => { probe.style.color = `var(--${name})`; return luminance(getComputedStyle(probe).color); };
  const ratio = (a, b) => { const [x, y] = [colour(a), colour(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const curves = [...Array(8).keys()].map((i) => ratio("c" + i, "card"));
  const texts = ["page", "card", "warn-page"].flatMap((b) => ["ink", "soft"].map((t) => ratio(t, b)));
  const small = ["page", "card"].map((b) => ratio("muted", b));
  const result = { curves, texts, small, dark: colour("page") < 0.1 };
  probe.remove();
  return result;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_in_light_and_dark(visit: Any, scheme: str) -> None:
    page = visit(scheme=scheme).page
    for dark in (scheme == "dark", scheme != "dark"):
        contrasts = page.evaluate(CONTRASTS)
        assert contrasts["dark"] == dark
        assert min(contrasts["texts"]) > 7
        assert min(contrasts["small"]) > 4.5
        assert min(contrasts["curves"]) > 3
        page.locator("#theme").click()  # and the other way round


def test_pictures_of_it_for_people(visit: Any, tmp_path: Path) -> None:
    """Written to $SCALELONG_SCREENSHOTS, if that is set, to be looked at."""
    folder = Path(os.environ.get("SCALELONG_SCREENSHOTS", tmp_path))
    for name, viewport, scheme in (("light", DESKTOP, "light"), ("dark", DESKTOP, "dark"), ("phone", PHONE, "light")):
        path = folder / f"report-{name}.png"
        visit(viewport, scheme).page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 50_000
