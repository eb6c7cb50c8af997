"""What the headless browser says is what the page shows."""

import shutil

import pytest

from tests.browser import ask, screenshot

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><style>
p { color: black } @media (prefers-color-scheme: dark) { p { color: white } }
</style></head><body><p>ü</p><button onclick="document.title = 'clicked'">b</button></body></html>
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_script_acts_on_the_page_and_returns_what_it_sees(page):
    script = """
        document.querySelector("button").click();
        await new Promise(done => setTimeout(done, 1000));
        const colour = getComputedStyle(document.querySelector("p")).color;
        return [document.title, document.querySelector("p").textContent, colour, innerWidth];
    """
    assert ask(page, script, width=700, dark=True) == ["clicked", "ü", "rgb(255, 255, 255)", 700]
    assert ask(page, script, width=1400) == ["clicked", "ü", "rgb(0, 0, 0)", 1400]


def test_a_script_that_fails_fails_the_test(page):
    with pytest.raises(AssertionError, match="nothing is not defined"):
        ask(page, "return nothing")


def test_a_picture_has_the_size_of_the_window(page, tmp_path):
    screenshot(page, tmp_path / "page.png", width=700, height=300)
    width, height = (
        int.from_bytes((tmp_path / "page.png").read_bytes()[i : i + 4], "big") for i in (16, 20)
    )
    assert (width, height) == (700, 300)


def test_without_a_browser_the_reason_is_told(page, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="no Chromium is installed"):
        ask(page, "return 1")
