"""A reader opens the notebooks in JupyterLab, runs all cells and moves the sliders; the picture and the numbers change.

Needs Debian's chromium (``apt-get install -y chromium``; another one: set CHROMIUM to its path). Screenshots are left in out/browser/.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator

import nbformat
import pytest

from tests.notebooks.pages import ROOT, tidy

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = ROOT / "out" / "browser"
RUN_ALL = 60_000  # milliseconds until the last cell of a notebook must have run

if CHROMIUM is None:
    print(
        "\n*** NO BROWSER: chromium is not installed, so nobody looks whether the widgets move. ***",
        file=sys.__stderr__,
    )
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER: chromium is not installed, the widgets were not tried"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on copies of the notebooks, at a free port -> its address."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    scratch = {"schedule": "schedule_explorer()", "memory": "memory_calculator()"}
    for name, call in scratch.items():
        page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"from minimeg.lab import *\n{call}")])
        tidy(page)  # which names the kernel
        nbformat.write(page, folder / "notebooks" / f"{name}.ipynb")
    quiet = (
        folder / "jupyter_config_dir" / "labconfig" / "page_config.json"
    )  # no question about news on top of the page
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
        "IPYTHONDIR",
    ):
        environment[name] = str(folder / name.lower())
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password="]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(command, cwd=folder / "notebooks", env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            yield browser
            browser.close()


def opened(browser, lab: str, name: str):
    """A notebook in JupyterLab's single-document mode, all its cells run."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(f"{lab}/doc/tree/{name}?reset", wait_until="domcontentloaded", timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", state="attached", timeout=60_000)
    started = page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[\*\]"))
    for _ in range(5):  # a page that has only just opened may ask for a kernel, or drop the order
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_timeout(1000)
        if (button := page.locator(".jp-Dialog .jp-mod-accept")).count():
            button.click()
        elif started.count() or page.locator(".jp-OutputArea .widget-vbox").count():
            break
    return page


def widget_of(page):
    """The explorer's controls and picture, once the notebook has run so far."""
    box = page.locator(".jp-OutputArea .widget-vbox").first
    deadline = time.monotonic() + RUN_ALL / 1000
    while box.count() == 0 or box.locator("svg").count() == 0:
        if time.monotonic() > deadline:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(SCREENSHOTS / "no_widget.png"))
            raise AssertionError("the widget did not appear; see out/browser/no_widget.png")
        page.evaluate("document.querySelector('.jp-WindowedPanel-outer')?.scrollTo(0, 1e9)")
        page.wait_for_timeout(500)
    box.scroll_into_view_if_needed()
    return box


def picture(box) -> str:
    return box.locator("svg").first.inner_html()


def says(box, words: str) -> str:
    """Wait until the numbers beneath the picture say so -> the picture, "" if there is none."""
    deadline = time.monotonic() + 20
    while words not in (told := box.locator("pre").first.inner_text()):
        assert time.monotonic() < deadline, f"waited for {words!r}, but the page says {told!r}"
        time.sleep(0.1)
    return picture(box) if box.locator("svg").count() else ""


def press(box, slider: int, key: str, times: int = 1) -> None:
    """Move a slider by keyboard, as a reader without a mouse does."""
    handle = box.locator(".noUi-handle").nth(slider)
    handle.focus()
    for _ in range(times):
        handle.press(key)


def choose(box, number: int, option: str) -> None:
    box.locator("select").nth(number).select_option(option)


def keep(page, box, name: str) -> None:
    """A screenshot of the widget and one of the page around it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    box.screenshot(path=str(SCREENSHOTS / f"{name}.png"))
    page.screenshot(path=str(SCREENSHOTS / f"{name}_page.png"))
    assert (SCREENSHOTS / f"{name}.png").stat().st_size > 5_000
    page.close()


def test_rank_explorer(browser, lab: str) -> None:
    page = opened(browser, lab, "01_rank_groups.ipynb")
    box = widget_of(page)
    pictures = [says(box, "tp  rank 5 with [4], inside one node")]
    press(box, 0, "ArrowRight", 2)
    pictures.append(says(box, "tp  rank 7 with [6], inside one node"))
    choose(box, 5, "pp-dp-cp-tp")
    pictures.append(says(box, "tp  rank 7 with [15], across 2 nodes"))
    assert len(set(pictures)) == 3
    choose(box, 0, "4")
    assert says(box, "not a multiple") == ""  # words in place of a picture
    choose(box, 0, "16")
    says(box, "tp  rank 7 with [15], across 2 nodes")
    keep(page, box, "rank_explorer")


def test_sharding_stepper(browser, lab: str) -> None:
    page = opened(browser, lab, "03_parallel_linears.ipynb")
    box = widget_of(page)
    pictures = [says(box, "all-reduces, forward: 1")]
    choose(box, 1, "1")
    pictures.append(says(box, "all-reduces, forward: 0"))
    choose(box, 1, "2")
    choose(box, 0, "rows")
    pictures.append(says(box, "no part of the relu"))
    keep_from = len(pictures[-1])
    press(box, 0, "ArrowLeft", 2)
    deadline = time.monotonic() + 20
    while len(picture(box)) >= keep_from:  # two frames of four
        assert time.monotonic() < deadline, "the slider did not take frames away"
        time.sleep(0.1)
    assert len(set(pictures)) == 3
    press(box, 0, "ArrowRight", 2)
    keep(page, box, "sharding_stepper")


def test_schedule_explorer(browser, lab: str) -> None:
    page = opened(browser, lab, "schedule.ipynb")
    box = widget_of(page)
    pictures = [says(box, "0.3750 of ideal")]
    press(box, 1, "ArrowRight", 8)  # sixteen micro-batches
    pictures.append(says(box, "0.1875 of ideal"))
    choose(box, 0, "gpipe")
    pictures.append(says(box, "by rank: 16 16 16 16"))
    choose(box, 0, "zb-h1")
    pictures.append(says(box, "by rank: 4 4 4 4"))
    assert len(set(pictures)) == 4
    keep(page, box, "schedule_explorer")


def test_memory_calculator(browser, lab: str) -> None:
    page = opened(browser, lab, "memory.ipynb")
    box = widget_of(page)
    pictures = [says(box, "= 54 sbh = 442,368 bytes")]
    choose(box, 3, "4")  # t
    pictures.append(says(box, "= 21 sbh"))
    choose(box, 4, "yes")
    pictures.append(says(box, "= 13.5 sbh"))
    choose(box, 5, "full")
    pictures.append(says(box, "2/t = 0.5 sbh"))
    press(box, 0, "ArrowRight")  # the micro-batch: the same in units of sbh, more bytes
    says(box, "6,144 bytes")
    assert len(set(pictures)) == 4
    keep(page, box, "memory_calculator")
