"""The results page, in a browser without a network: what it shows, and what a click does."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from bench.page import page as page_module
from bench.page.page import kept_on_page, page_and_details, page_of
from bench.page.runs import label_of, pareto_front, values_of
from common.records.store import Record, kept_records
from tests.pace import patient, slowness_now

LARGEST_BYTES = 3_000_000
DRAWN_S = patient(30)
NO_BROWSER = "needs Chromium and its driver: `make browser` installs them on Debian"
NUMBERS = "return [...document.querySelectorAll('#runs tbody tr')].map(row => row.children[{column}].textContent)"

needs_browser = pytest.mark.skipif(not shutil.which("chromedriver"), reason=NO_BROWSER)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "results.html"
    path.write_text(page_of(kept_on_page()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    """A browser to which each name is unknown, so that no request leaves the machine."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield started
    started.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome, page: Path) -> webdriver.Chrome:
    """The browser that has just drawn the page."""
    driver.set_window_size(1400, 1000)
    for log in ("browser", "performance"):
        driver.get_log(log)  # what was there before
    driver.get(page.as_uri())
    WebDriverWait(driver, DRAWN_S).until(lambda _: driver.execute_script("return document.body.dataset.drawn"))
    return driver


def cells(browser: webdriver.Chrome, column: int) -> list[str]:
    return browser.execute_script(NUMBERS.format(column=column))


@needs_browser
def test_every_record_is_shown_without_a_request_or_an_error(browser: webdriver.Chrome, page: Path) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    assert browser.get_log("browser") == []
    completed = [label_of(record) for record in kept_on_page() if record["status"] == "completed"]
    assert sorted(cells(browser, 1)) == sorted(completed)
    drawn = [svg.size for svg in browser.find_elements(By.CSS_SELECTOR, ".chart svg")]
    assert [size["width"] > 300 and size["height"] > 200 for size in drawn] == [True] * 4


@needs_browser
def test_a_click_on_a_heading_sorts_and_another_one_turns_the_order_round(browser: webdriver.Chrome) -> None:
    headings = browser.find_elements(By.CSS_SELECTOR, "#runs th")
    column = [heading.text for heading in headings].index("Training (min)")
    for is_reverse in (False, True):
        headings[column].find_element(By.TAG_NAME, "button").click()
        minutes = [float(text.replace(",", "")) for text in cells(browser, column)]
        assert minutes == sorted(minutes, reverse=is_reverse)


@needs_browser
def test_words_filter_the_runs(browser: webdriver.Chrome) -> None:
    browser.find_element(By.ID, "filter").send_keys("qlora ddp")
    values = map(values_of, kept_records())
    expected = [run["run"] for run in values if run["technique"] == "QLoRA" and "DDP" in run["parallel"]]
    assert cells(browser, 1) == expected
    assert browser.find_element(By.ID, "count").text.startswith(f"{len(expected)} of ")


@needs_browser
def test_two_chosen_runs_show_their_differences_commands_and_losses(browser: webdriver.Chrome) -> None:
    runs = ("2.4 python-batch16-seed42", "2.4 python-batch16-seed7")
    others = browser.find_elements(By.CSS_SELECTOR, "#runs input:checked")
    chosen = [browser.find_element(By.CSS_SELECTOR, f"[aria-label='Choose {run}']") for run in runs]
    for box in (*others, *chosen):
        browser.execute_script("arguments[0].click()", box)
    rows = browser.find_elements(By.CSS_SELECTOR, "#difference tr")
    assert [row.text.split() for row in rows[1:]] == [["seed", "42", "7"]]
    expected = [values["command"] for values in map(values_of, kept_records()) if values["run"] in runs]

    def commands(_: object) -> bool:
        return [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#commands pre")] == expected

    WebDriverWait(browser, DRAWN_S).until(commands)

    def legend(_: object) -> bool:
        texts = {text.text for text in browser.find_elements(By.CSS_SELECTOR, "#losses svg .role-legend-label text")}
        return set(runs) <= texts and "2.1 python-batch16-seed42" not in texts

    WebDriverWait(browser, DRAWN_S).until(legend)


@needs_browser
def test_on_a_narrow_screen_nothing_sticks_out(browser: webdriver.Chrome) -> None:
    browser.set_window_size(500, 900)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_the_page_is_small_and_the_same_each_time(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) <= LARGEST_BYTES
    assert text == page_of(kept_on_page())


def test_a_run_of_this_machine_stands_for_its_kept_record_and_cannot_end_a_script() -> None:
    kept = kept_records()[:3]
    own = {**kept[0], "command": "python workflow.py --note '</script><b>'"}
    page = page_of(kept, [own])
    assert page.count("</script>") == 3
    data = data_in(page)
    assert [run["command"] == own["command"] for run in data["details"][0]].count(True) == 1
    assert len(runs_in(data)) == 3


def test_a_run_without_facts_and_with_a_loss_that_is_no_number_is_shown() -> None:
    own = deepcopy(kept_records()[0])
    for quality in own["quality"].values():
        quality["facts_said_share"] = None
    own["training_losses"][-1][1] = math.nan
    run = runs_in(data_in(page_of([own])))[0]
    assert (run["metric"], run["before"], run["quality"]) == (None, None, None)


def test_settings_are_those_that_mean_something_also_in_older_records() -> None:
    new = next(record for record in kept_records() if record["parallel"] == "ddp")
    old = deepcopy(new)
    del old["config"]["threads"]
    assert values_of(old)["settings"] == values_of(new)["settings"]
    assert not {"stages", "offload", "run_name"} & values_of(new)["settings"].keys()


def data_in(page: str) -> dict[str, Any]:
    start = page.index('type="application/json">') + len('type="application/json">')
    return json.loads(page[start : page.index("</script>", start)])


def runs_in(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table, whose texts stand in a list of their own."""
    keys, texts = data["runs"]["keys"], data["texts"]
    return [
        {key: texts[value[0]] if isinstance(value, list) else value for key, value in zip(keys, row, strict=True)}
        for row in data["runs"]["rows"]
    ]


def test_no_run_beats_those_of_the_front() -> None:
    measured = [(0.5, 2.0), (0.4, 1.0), (0.45, 3.0), (0.9, 9.0), (0.9, 8.0), (0.3, None), (None, 0.5)]
    same = {"group": "chat: m, d", "is_trial": False}
    runs = [{**same, "quality": quality, "minutes": minutes} for quality, minutes in measured]
    runs.append({**same, "quality": 1.0, "minutes": 0.5, "is_trial": True})
    front = [(run["cost"], run["quality"]) for run in pareto_front(runs, "minutes")]
    assert front == [(1.0, 0.4), (2.0, 0.5), (8.0, 0.9)]


# -- what others wrote, and many runs

HOSTILE = (
    "<!-- <script>document.body.dataset.ran = 'yes'</script> @@LIBRARY@@ <img src=x onerror=\"document.title='ran'\">"
)
MOST_BYTES, RUNS_OF_THE_BAR = 5_000_000, 10_000
MADE_S, MOST_MIB = 10, 500  # seconds of the reference machine's processor


def many(records: list[Record], count: int) -> Iterator[Record]:
    """Runs of a sweep: as the kept ones, each with a name, a seed and losses of its own."""
    for number in range(count):
        run = deepcopy(records[number % len(records)])
        run["run_name"], run["config"]["seed"] = f"run-{number:05}-of-a-sweep", number
        run["command"] += f" --seed {number} --run_name {run['run_name']}"
        for kind in ("training_losses", "validation_losses"):
            run[kind] = [[step, loss * (1 + number / 1e5)] for step, loss in run[kind]]
        yield run


def drawn(driver: webdriver.Chrome, path: Path) -> None:
    driver.get_log("browser")
    driver.get(path.as_uri())
    WebDriverWait(driver, DRAWN_S).until(lambda _: driver.execute_script("return document.body.dataset.drawn"))


def test_the_page_grows_little_with_each_run_and_the_rest_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MOST_BYTES_WITHIN", 0)
    monkeypatch.setattr(page_module, "_library", lambda: "")
    kept = kept_records()[:10]
    sizes = [len(page_and_details([], many(kept, count))[0]) for count in (10, 40)]
    assert (sizes[1] - sizes[0]) / 30 * RUNS_OF_THE_BAR <= MOST_BYTES - 1_000_000, "with the library"
    _, beside = page_and_details([], many(kept[:5], 101))
    assert [script.count('"command"') for script in beside] == [100, 1]
    assert not any("<" in script for script in beside)


@needs_browser
@pytest.mark.slow
def test_texts_of_a_record_do_nothing_and_details_load_from_files_beside_the_page(
    driver: webdriver.Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deepcopy(next(record for record in kept_records() if record.get("gallery")))
    run["config"]["data"] = run["command"] = run["environment"]["devices"][0] = HOSTILE
    run["gallery"][0] |= {"question": HOSTILE, "picture": "javascript:document.title='ran'", HOSTILE: HOSTILE}
    for most in (10**7, 0):
        monkeypatch.setattr(page_module, "MOST_BYTES_WITHIN", most)
        page_module.write_page(tmp_path / "own.html", [], [run])
        assert (tmp_path / "results_details" / "0.js").exists() == (most == 0)
        drawn(driver, tmp_path / "own.html")
        assert driver.execute_script("return [document.body.dataset.ran ?? null, document.title.includes('ran')]") == [
            None, False
        ]  # fmt: skip
        assert HOSTILE in [each.text for each in driver.find_elements(By.CSS_SELECTOR, "#commands pre")]
        assert len(driver.find_elements(By.CSS_SELECTOR, "#losses svg")) == 1
    (tmp_path / "results_details" / "0.js").unlink()
    drawn(driver, tmp_path / "own.html")
    assert "results_details/0.js" in driver.find_element(By.ID, "commands").text


MAKE = """
import resource, sys
from pathlib import Path
from common.records.store import records_in
from bench.page import page
from common.reporting.rows import result_files
page.write_page(Path(sys.argv[1]), [], (run for _, run in records_in(result_files(Path(sys.argv[2])))))
peak_kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]  # ru_maxrss has the parent's, too
print(int(peak_kib) // 1024, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
"""


@needs_browser
@pytest.mark.slow
def test_the_page_of_ten_thousand_runs_is_made_and_drawn(driver: webdriver.Chrome, tmp_path: Path) -> None:
    for run in many(kept_records(), RUNS_OF_THE_BAR):
        folder = tmp_path / "results" / run["run_name"]
        folder.mkdir(parents=True)
        (folder / "run_record.json").write_text(json.dumps(run))
    page = tmp_path / "page.html"
    slowness = slowness_now()  # an hour before, the machine may have been faster
    made = subprocess.run([sys.executable, "-c", MAKE, page, tmp_path / "results"], capture_output=True, text=True)
    most_s = MADE_S * max(slowness, slowness_now())
    assert made.returncode == 0, made.stderr
    mib, processor_s = map(float, made.stdout.split())
    assert (mib <= MOST_MIB, processor_s <= most_s, page.stat().st_size <= MOST_BYTES) == (True, True, True)
    drawn(driver, page)
    assert driver.find_element(By.ID, "count").text == f"{RUNS_OF_THE_BAR} of {RUNS_OF_THE_BAR} runs"
    assert driver.find_elements(By.CSS_SELECTOR, "#commands pre")
    assert len(driver.find_elements(By.CSS_SELECTOR, "#runs tbody tr")) < RUNS_OF_THE_BAR / 10
    driver.execute_script("document.querySelector('.scroll').scrollTop = 1e6")
    WebDriverWait(driver, DRAWN_S).until(lambda _: len(driver.find_elements(By.CSS_SELECTOR, "#runs tbody tr")) > 300)
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
