"""A headless Chromium, driven by its command line: open a page, ask it something, take a picture.

    from tests.browser import ask, screenshot

    ask(page, "return document.title")
    ask(page, "document.querySelector('#layer').click(); return shown()", width=700, dark=True)
    screenshot(page, tmp_path / "page.png", width=700, dark=True)

A test that uses them is skipped, with the reason, where no Chromium is installed.
"""

import json
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60
PATIENCE = 5000  # milliseconds of the page's own clock, which runs ahead where nothing is to do

# Runs after the page has loaded; what it returns, or the error, ends up in the element's data.
_QUESTION = """
<script>
addEventListener("load", async () => {
  const ask = async () => { %s };
  const answer = {};
  try { answer.value = (await ask()) ?? null; } catch (error) { answer.error = `${error}`; }
  document.documentElement.dataset.answer = JSON.stringify(answer);
});
</script>
"""


def ask(
    page: Path, script: str, *, width: int = 1400, height: int = 1000, dark: bool = False
) -> Any:
    """Run JavaScript in a page that is open, and return what it returns, a JSON value.

    Args:
        script: the body of an async function, which may click, type and wait.
        width, height: of the window, in pixels; at least 500 wide.
        dark: whether the reader's system asks for dark pages.

    Raises:
        AssertionError: the script has thrown something, or has not ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / page.name
        copy.write_text(page.read_text(encoding="utf-8") + _QUESTION % script, encoding="utf-8")
        flags = ["--dump-dom", f"--virtual-time-budget={PATIENCE}"]
        reader = _AnswerReader()
        reader.feed(_run(copy, flags, width=width, height=height, dark=dark))
    assert reader.answer is not None, f"no answer after {PATIENCE} ms: {script}"
    assert "error" not in reader.answer, reader.answer["error"]
    return reader.answer["value"]


def screenshot(
    page: Path, picture: Path, *, width: int = 1400, height: int = 1000, dark: bool = False
) -> None:
    """Write a PNG of the upper left of a page, of a width and height in pixels."""
    flags = [f"--screenshot={picture}", f"--virtual-time-budget={PATIENCE}"]
    _run(page, flags, width=width, height=height, dark=dark)
    assert picture.read_bytes().startswith(b"\x89PNG")


def _run(page: Path, flags: list[str], *, width: int, height: int, dark: bool) -> str:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium is installed (none of {', '.join(NAMES)})")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *flags,
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode()


class _AnswerReader(HTMLParser):
    """Finds the answer in the data of the page's first element."""

    answer: dict[str, Any] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs).get("data-answer")
        if tag == "html" and found is not None:
            self.answer = json.loads(found)
