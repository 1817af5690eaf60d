"""The chat page: what it may load, who may see it, and, in a real browser, that one can chat with it."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Iterator

import pytest

from tests.serving.http.conftest import TIMEOUT, Server, serving
from tests.serving.http.test_drills import assert_nothing_is_held


def test_the_page_loads_nothing_from_elsewhere(http):
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    linked = [target for target in re.findall(r'(?:src|href)="([^"]*)"', page.text) if not target.startswith("data:")]
    assert linked == ["page/chat.css", "page/chat.js"]
    for path in ("/", *(f"/{target}" for target in linked)):
        answer = http.get(path)
        assert answer.status_code == 200 and "://" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_no_key_and_its_requests_do(server):
    with serving(server.llm, api_keys=["secret"]) as locked, locked.http() as http:
        for path in ("/", "/page/chat.css", "/page/chat.js"):
            assert http.get(path).status_code == 200
        assert http.post("/v1/chat/completions", json={"messages": []}).status_code == 401


def test_the_page_can_be_switched_off(server):
    with serving(server.llm, chat_page=False, api_keys=["secret"]) as plain, plain.http() as http:
        assert http.get("/").status_code == 401
        assert http.get("/", headers={"Authorization": "Bearer secret"}).status_code == 404


# -- in a browser


class Page:
    """The page in headless Chromium, through chromedriver."""

    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get(url)

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def until(self, condition):
        from selenium.webdriver.support.wait import WebDriverWait
        return WebDriverWait(self.driver, TIMEOUT).until(lambda _: condition())

    def say(self, text: str) -> None:
        self.find("#prompt").send_keys(text + "\n")

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.driver.find_elements("css selector", selector)]

    def close(self) -> None:
        errors = [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        # A refused request is shown to the user, and the browser logs it, too.
        assert all("401" in entry["message"] for entry in errors), errors


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Iterator:
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                 "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
                 "window-size=1000,800", f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, Service(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def locked(server) -> Iterator[Server]:
    with serving(server.llm, api_keys=["secret"]) as locked:
        yield locked


@pytest.mark.slow
def test_a_chat_in_a_browser(driver, locked):
    page = Page(driver, locked.url)
    page.until(lambda: "API key" in page.find("#state").text)
    page.say("Hello")
    assert page.until(lambda: page.texts(".fault")) == ["give a valid API key: Authorization: Bearer KEY"]

    page.find("#key").send_keys("secret")  # the settings have opened by themselves
    page.find("#max-tokens").send_keys("12")
    page.find("#temperature").send_keys("0")
    page.find("#system").send_keys("S")
    page.say("Hello")
    page.until(lambda: page.find("#state").text == "tiny")
    facts = page.until(lambda: page.texts(".facts"))
    assert re.fullmatch(r"12 tokens · [\d.]+ tokens/s · first after [\d.]+ s · \d+ of \d+ prompt tokens cached"
                        r" · cut off at the limit", facts[0]), facts
    assert page.texts("article.user .text") == ["Hello", "Hello"]
    answer = page.find("article.assistant:last-of-type .text").get_attribute("textContent")
    with locked.client(api_key="secret") as client:
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
        same = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    assert answer == same.choices[0].message.content

    page.say("More")  # with what was said before, which the cache has
    facts = page.until(lambda: len(page.texts(".facts")) == 2 and page.texts(".facts")[1])
    assert not re.search(r"· 0 of", facts), facts
    stored = driver.execute_script("return JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert stored == '[{},{},""]', "keys are in memory only"

    page.find("#new").click()
    assert page.texts("article") == [] and page.find("#empty").is_displayed()
    page.close()


@pytest.mark.slow
def test_stopping_an_answer_in_a_browser(driver, make_llm, monkeypatch):
    with make_llm() as llm, serving(llm) as server:
        page = Page(driver, server.url)
        page.until(lambda: page.find("#state").text == "tiny")
        step, steps, gate = llm._core.step, itertools.count(), threading.Event()

        def held():  # the answer does not end by itself
            if next(steps) > 10:
                gate.wait(TIMEOUT)
            step()

        monkeypatch.setattr(llm._core, "step", held)
        page.say("Hello")
        page.until(lambda: page.find("#stop").is_displayed())
        page.find("#stop").click()
        assert page.until(lambda: page.texts(".facts")) == ["stopped"]
        assert page.find("#send").is_displayed()
        gate.set()
        assert_nothing_is_held(server)
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1000])
def test_every_control_has_a_name_and_nothing_sticks_out(driver, server, width):
    driver.set_window_size(max(width, 500), 800)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500})
    page = Page(driver, server.url)
    page.find("#settings-button").click()
    page.say("x" * 60)
    page.until(lambda: page.texts(".facts"))
    controls = [control for control in driver.find_elements("css selector", "button, input, textarea")
                if control.is_displayed()]
    assert len(controls) == 8 and all(control.accessible_name for control in controls)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    page.close()
