"""The page of `evener report` in headless Chromium: it draws, zooms and resizes, and asks nobody for anything."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from evener.cli import main
from tests.test_report_tells_the_whole_story import HOSTILE, phases, start, update, write

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError:
    webdriver = None  # type: ignore[assignment]

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver: apt-get install chromium chromium-driver",
    ),
    pytest.mark.skipif(webdriver is None, reason="selenium is not installed: pip install -r requirements/dev.txt"),
]
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --disable-dev-shm-usage"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 400 updates, two ranks, killed once and continued, with names that would be markup."""
    path = tmp_path_factory.mktemp("runs") / "digits"
    curve = [math.exp(-n / 100) + 0.01 * (n % 5) for n in range(400)]
    points = [update(n, 10.0 + n / 10, curve[n], metrics={HOSTILE: 1 - curve[n] / 2}) for n in range(400)]
    times = [
        phases(10.0 + n / 10, n, 50, forward=2.0, backward=2.0, reduction=0.9, data_wait=0.1)
        for n in range(49, 400, 50)
    ]
    death = [
        start(32.0),
        {"t": 33.0, "kind": "resume", "update": 199, "checkpoint": "update-200", "redone_updates": 20},
    ]
    story = sorted([*points, *times], key=lambda event: event["update"])
    write(
        path,
        start(9.0),
        *story[:224],
        *death,
        *story[225:],
        {"t": 55.0, "kind": "finish", "update": 399, "updates": 400, "seconds": 50.0},
    )
    return write(path, *({**one, "memory_bytes": 200 << 20} for one in times), rank=1)


def opened(browser, page, *, width=1200, dark=False, mobile=False):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    wait(browser, "return window.evenerPlots && window.evenerPlots.length > 0")


def wait(browser, script):
    """Until the script's value is true; a bounded wait, because the machine may be busy."""
    return WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(script))


def quiet(browser, page):
    """No word on the console, and no request but for the page itself."""
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    ours = [
        one["request"]["url"] for one in sent if one["documentURL"].startswith(page.as_uri())
    ]  # not the browser's own
    assert {url.partition("#")[0] for url in ours} == {page.as_uri()}


@pytest.fixture(scope="module")
def page(folder):
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def hover(browser, chart=0, share=0.5):
    """The pointer onto a chart, at this part of its width."""
    over = browser.find_elements(By.CSS_SELECTOR, ".u-over")[chart]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(browser).move_to_element_with_offset(over, int((share - 0.5) * over.size["width"]), 0).perform()
    return over


def test_it_draws_tells_a_value_zooms_and_resizes(browser, page):
    opened(browser, page)
    assert "digits" in browser.title and "400 updates in" in browser.find_element(By.CSS_SELECTOR, ".lead").text
    plots = browser.execute_script("return evenerPlots.map(one => one.chart.title)")
    assert plots[0] == "loss" and len(plots) == len(browser.find_elements(By.CSS_SELECTOR, ".plot canvas")) >= 7
    ink = (
        "const c = document.querySelector('.plot canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height)"
    )
    assert (
        browser.execute_script(f"{ink}.data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n")
        > 500
    )

    hover(browser)
    tip = wait(browser, "const t = document.querySelector('.tip'); return t.style.display === 'block' && t.textContent")
    number, value = browser.execute_script(
        "const p = evenerPlots[0].plot, i = p.cursor.idx; return [p.data[0][i], p.data[1][i]]"
    )
    assert 150 < number < 250 and f"update {number}" in tip and f"{value:.5g}"[:6] in tip

    before = browser.execute_script("return evenerPlots.map(one => [one.plot.scales.x.min, one.plot.scales.x.max])")
    over = hover(browser, share=0.25)
    third = int(over.size["width"] / 3)
    ActionChains(browser).click_and_hold().move_by_offset(third, 0).release().perform()
    wait(browser, "const x = evenerPlots[0].plot.scales.x; return x.max - x.min < 200")
    ranges = browser.execute_script("return evenerPlots.map(one => [one.plot.scales.x.min, one.plot.scales.x.max])")
    assert all(one == pytest.approx(ranges[0], abs=1) for one in ranges), "all charts show the same stretch"
    browser.find_element(By.CSS_SELECTOR, "button[data-whole]").click()
    wait(browser, "const x = evenerPlots[0].plot.scales.x; return x.max - x.min > 390")
    assert browser.execute_script("return evenerPlots[0].plot.scales.x.max") == before[0][1]

    button = browser.find_element(By.CSS_SELECTOR, "button[data-log]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    wait(browser, "return evenerPlots[0].plot.scales.y.distr === 3")
    assert button.get_attribute("aria-pressed") == "true"

    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait(browser, "return evenerPlots.every(one => one.plot.width === one.host.clientWidth && one.plot.width < 680)")
    quiet(browser, page)


def test_it_fits_a_phone_in_the_dark(browser, page):
    opened(browser, page, width=360, dark=True, mobile=True)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in background[4:-1].split(",")) < 120
    grey = browser.execute_script("return evenerPlots[0].plot.axes[0].stroke()")
    assert grey == browser.execute_script(
        "return getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()"
    )
    quiet(browser, page)


def test_what_others_named_stays_text_in_the_browser(browser, page):
    opened(browser, page)
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe, main script") == []
    assert "<script>alert(1)</script>" in browser.find_element(By.CSS_SELECTOR, "main").text
    chart = browser.execute_script("return evenerPlots.findIndex(one => one.chart.title.includes('alert'))")
    hover(browser, chart)
    wait(browser, f"const t = document.querySelectorAll('.tip')[{chart}]; return t.style.display === 'block'")
    # the page's own policy: a script that got in would not run, and nothing may be fetched
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.got = 1'; document.body.append(s)"
    )
    assert browser.execute_script("return window.got === undefined")
    browser.get_log("browser")  # the refusal


def test_several_runs_lie_side_by_side(browser, page, folder, tmp_path):
    other = write(tmp_path / "other", start(0.0), *(update(n, 1.0 + n, 2.0 - n / 100) for n in range(0, 100, 3)))
    both = tmp_path / "both.html"
    assert main(["report", str(folder), str(other), "-o", str(both)]) == 0
    opened(browser, both)
    series = browser.execute_script("return evenerPlots[0].chart.series.map(one => one.label)")
    assert series == ["digits", "other"] and len(browser.find_elements(By.TAG_NAME, "h1")) == 2
    hover(browser, share=0.1)
    wait(
        browser,
        "const t = document.querySelector('.tip').textContent; return t.includes('digits') || t.includes('other')",
    )
    quiet(browser, both)
