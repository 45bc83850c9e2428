"""The whole site: built without a warning, crawled, then read in Chromium with no way out: nothing asked of another host.

Slow, so under ``make soak``; needs the docs extra, and Debian's chromium (set CHROMIUM to the path of another). What it measured is
printed (``pytest -s``): build time, size, requests, the explorer's seconds, the lowest contrast.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
HAS_SPHINX = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_nb", "furo"))
SMALL_TEXT, LARGE_TEXT = 4.5, 3.0  # WCAG 2.1, level AA
READY = 60.0  # seconds in which the explorer must run Python, also on a busy machine

for there, words in ((HAS_SPHINX, "the docs extra is not installed"), (CHROMIUM, "chromium is not installed")):
    if not there:
        print(f"\n*** SITE NOT TESTED IN FULL: {words}. ***", file=sys.__stderr__)
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not HAS_SPHINX, reason="SITE NOT TESTED: the docs extra is not installed"),
]
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER: chromium is not installed, the site was not looked at"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew from a copy of what it is made from, a warning being an error."""
    folder = tmp_path_factory.mktemp("site")
    leave = shutil.ignore_patterns("_build", "__pycache__", "course", "api", "pictures", ".ipynb_checkpoints")
    for name in ("docs", "notebooks", "minimeg"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for fetched in (ROOT / "docs" / "_build").glob("pyodide-*"):  # as `make docs` has left it; never fetched by a test
        shutil.copytree(fetched, folder / "docs" / "_build" / fetched.name)
    out = folder / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, "docs", str(out)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    python = sum(path.stat().st_size for path in (out / "_static" / "explorer" / "pyodide").rglob("*"))
    print(
        f"\nbuilt in {time.monotonic() - started:.0f} s, {size / 1e6:.1f} MB, of which Python for the browser {python / 1e6:.1f} MB"
    )
    return out


class Page(HTMLParser):
    """Addresses that a page refers to, the places in it that have a name, and its pictures without words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.wordless: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.names |= {of[name] for name in ("id", "name") if of.get(name)}
        if "href" in of:
            (self.links if tag == "a" else self.loaded).append(of["href"])
        if "src" in of:
            self.loaded.append(of["src"])
        if tag == "img" and not of.get("alt", "").strip():
            self.wordless.append(of.get("src", ""))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def broken(site: Path, pages: dict[Path, Page]) -> list[str]:
    faults = []
    for path, page in pages.items():
        base = f"http://site/{path.relative_to(site).as_posix()}"
        for address in [*page.links, *page.loaded]:
            whole, fragment = urldefrag(urljoin(base, address))
            parts = urlsplit(whole)
            if parts.scheme != "http" or parts.netloc != "site":
                continue
            target = site / unquote(parts.path).lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                faults.append(f"{path.name}: {address}")
            elif fragment and target in pages and unquote(fragment) not in pages[target].names:
                faults.append(f"{path.name}: {address} has no such place")
    return faults


def test_no_broken_link(site: Path, pages: dict[Path, Page]) -> None:
    count = sum(len(page.links) + len(page.loaded) for page in pages.values())
    assert broken(site, pages) == []
    assert count > 1000
    print(f"{len(pages)} pages, {count} links, none broken")


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html">b</a><a href="#x">x</a><img src="c.svg" alt=""><p id="y"></p>')
    page = Page(tmp_path / "a.html")
    assert len(broken(tmp_path, {tmp_path / "a.html": page})) == 3
    assert page.wordless == ["c.svg"]


def test_every_picture_has_words(pages: dict[Path, Page]) -> None:
    assert {path.name: page.wordless for path, page in pages.items() if page.wordless} == {}


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    found = {address for page in pages.values() for address in page.loaded if urlsplit(address).netloc}
    assert found == set()


# ---- in a browser ----------------------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            yield browser
            browser.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Any]:
    """Open pages with the network off but for the site itself -> (page, what was asked of others, errors)."""
    contexts = []

    def open_page(width: int = 1280, **options: Any) -> tuple[Any, list[str], list[str]]:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        elsewhere: list[str] = []
        errors: list[str] = []

        def gate(route: Any) -> None:
            if route.request.url.startswith((f"{address}/", "data:", "blob:")):
                route.continue_()
            else:
                elsewhere.append(route.request.url)
                route.abort()

        context.route("**/*", gate)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
        return page, elsewhere, errors

    yield open_page
    for context in contexts:
        context.close()


def names_of(site: Path, pages: dict[Path, Page]) -> list[str]:
    return [path.relative_to(site).as_posix() for path in pages]


CONTRAST = """() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (c) => { const [r, g, b] = c.map((x) => { x /= 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  const ground = (e) => { const layers = [];
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0) layers.push(c);
      if (c[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || e.closest("svg, math, script, style")) continue;
    if (!e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    const style = getComputedStyle(e), behind = ground(e), ink = over(parse(style.color), behind);
    const [a, b] = [light(ink), light(behind)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const key = `${style.color} on ${behind.map(Math.round)} ${large}`;
    if (!found.has(key))
      found.set(key, {ratio, large, words: `${e.tagName}.${e.className}: ${node.data.trim().slice(0, 40)} (${key})`});
  }
  return [...found.values()];
}"""


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_asks_nobody_and_can_be_read(
    visit: Any, site: Path, pages: dict[Path, Page], address: str, scheme: str
) -> None:
    page, elsewhere, errors = visit(color_scheme=scheme)
    faint, lowest = {}, 21.0
    for name in names_of(site, pages):
        page.goto(f"{address}/{name}", wait_until="load")
        for text in page.evaluate(CONTRAST):
            lowest = min(lowest, text["ratio"])
            if text["ratio"] < (LARGE_TEXT if text["large"] else SMALL_TEXT):
                faint[text["words"]] = f"{text['ratio']:.2f} in {name}"
    print(f"{scheme}: {len(pages)} pages, requests to other hosts {len(elsewhere)}, lowest contrast {lowest:.2f}")
    assert elsewhere == []
    assert errors == []
    assert faint == {}


# Furo lets a page that is too wide scroll sideways; a reader should not have to, but for tables and code, which scroll in themselves.
STICKING_OUT = """() => {
  const own = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const scrolls = (e) => e && e.tagName !== "ARTICLE" && (own(e) || scrolls(e.parentElement));
  return [...document.querySelectorAll("article *")]
    .filter((e) => !e.closest("svg, math") && e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
    .map((e) => `${e.tagName}.${e.className} ${Math.round(e.getBoundingClientRect().right)}: ${e.textContent.trim().slice(0, 40)}`);
}"""


@in_browser
def test_pages_fit_a_narrow_screen(visit: Any, site: Path, pages: dict[Path, Page], address: str) -> None:
    page, elsewhere, _ = visit(width=400)
    wide = {}
    for name in names_of(site, pages):
        page.goto(f"{address}/{name}", wait_until="load")
        if found := page.evaluate(STICKING_OUT):
            wide[name] = found[:3]
    assert wide == {}
    assert elsewhere == []


def set_slider(page: Any, name: str, value: float) -> None:
    page.locator(f"#x-{name}").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", value
    )


@in_browser
def test_prepared_pictures_move_with_the_sliders(visit: Any, address: str) -> None:
    page, elsewhere, errors = visit()
    page.goto(f"{address}/explorer.html")
    assert "0.3750 of ideal" in page.inner_text("#explorer .lines")
    set_slider(page, "m", 12)
    assert "0.2500 of ideal" in page.inner_text("#explorer .lines")
    page.select_option("#x-name", "gpipe")
    image = page.locator("#explorer .picture img")
    assert "12 12 12 12" in image.get_attribute("alt")
    page.wait_for_function("document.querySelector('#explorer .picture img').naturalWidth > 700")
    page.locator("#x-p").press("ArrowLeft")  # by keyboard
    assert "12 12 12" in page.inner_text("#explorer .lines")
    assert (elsewhere, errors) == ([], [])


@in_browser
def test_a_page_opened_as_a_file_shows_pictures(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "explorer.html").as_uri())
    set_slider(page, "m", 4)
    assert "0.7500 of ideal" in page.inner_text("#explorer .lines")
    page.wait_for_function("document.querySelector('#explorer .picture img').naturalWidth > 700")
    assert page.locator("#explorer .start").count() == 0
    page.close()


@in_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_python_runs_in_the_page(visit: Any, site: Path, address: str, width: int) -> None:
    if not (site / "_static" / "explorer" / "pyodide").is_dir():
        pytest.skip("NO PYTHON FOR THE BROWSER: `make docs` has not fetched it")
    page, elsewhere, errors = visit(width=width)
    page.goto(f"{address}/explorer.html")
    started = time.monotonic()
    page.click("#explorer .start")
    page.wait_for_selector("#explorer[data-ready=yes]", timeout=READY * 1000)
    print(f"explorer ready in {time.monotonic() - started:.1f} s at {width} px")
    page.select_option("#x-name", "zb-h1")
    assert "4 4 4 4" in page.inner_text("#explorer .lines")
    assert page.locator("#explorer .picture svg").count() == 1
    page.fill("#x-table", "F0 B0 F1 B1\nF1 F0 B0 B1")
    page.click("#explorer .prove")
    assert "ranks wait for each other in a circle" in page.inner_text("#explorer .lines")
    page.fill("#x-table", "F0 F1 B0 B1\nF0 B0 F1 B1")
    page.click("#explorer .prove")
    assert "no deadlock" in page.inner_text("#explorer .lines")
    assert page.evaluate(STICKING_OUT) == []
    assert (elsewhere, errors) == ([], [])


@in_browser
def test_a_request_to_elsewhere_is_noticed(visit: Any, address: str) -> None:
    page, elsewhere, _ = visit()
    page.goto(f"{address}/index.html")
    page.evaluate("fetch('http://elsewhere.invalid/x').catch(() => 0)")
    page.wait_for_timeout(200)
    assert elsewhere == ["http://elsewhere.invalid/x"]
