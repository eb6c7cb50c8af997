"""What a package index, GitHub and a citation read: the page, workflows, the version."""

from __future__ import annotations

import re
import runpy
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import kvtool

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
for_index, source_address, index_page = (
    SETUP[name] for name in ("for_index", "source_address", "index_page")
)
REPOSITORY = "https://github.com/someone/somewhere"
README = (ROOT / "README.md").read_text(encoding="utf-8")
RELATIVE = re.compile(r"\]\((?!https://)")


def test_the_page_has_no_relative_links_and_no_html():
    for source in (None, REPOSITORY):
        page = for_index(README, source, "1.0.0")
        outside_code = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
        assert not RELATIVE.search(outside_code)
        assert "<picture" not in page
        assert "<img" not in page
        assert "pip install -c constraints.txt -e '.[test]' && pytest" in page
        assert ("![" in page) == (source is not None)


def test_links_lead_to_the_tag_of_the_version():
    text = (
        '<picture>\n<source srcset="dark.svg">\n<img alt="Codes" src="a/light.svg">\n</picture>\n\n'
        "[here](#place), [there](kvtool/README.md#x), [away](https://else.where/y)\n"
        "```python\nnames[0](one)\n```\n"
    )
    assert for_index(text, REPOSITORY, "0.2.0") == (
        f"![Codes]({REPOSITORY}/raw/v0.2.0/a/light.svg)\n\n"
        f"[here]({REPOSITORY}/blob/v0.2.0/README.md#place), "
        f"[there]({REPOSITORY}/blob/v0.2.0/kvtool/README.md#x), [away](https://else.where/y)\n"
        "```python\nnames[0](one)\n```\n"
    )
    assert "/blob/HEAD/" in for_index(text, REPOSITORY, "0.2.0.dev0")
    assert for_index(text, None, "0.2.0").startswith("here, there, [away](https://else.where/y)")


def test_the_address_is_that_of_the_project():
    project = '[project]\nname = "x"\n\n[project.urls]\nDocs = "https://a"\nSource = "https://b/"\n'
    assert source_address(project) == "https://b"
    assert source_address('[project]\nname = "x"\n\n[tool.x]\nSource = "https://c"\n') is None
    page = index_page()
    named = source_address((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert page == for_index(README, named, kvtool.__version__)


@pytest.mark.exhaustive
def test_the_metadata_of_the_wheel_hold_the_page_and_the_version(tmp_path, monkeypatch):
    """As pip builds them, from the declaration of both in pyproject.toml."""
    build_meta = pytest.importorskip("setuptools.build_meta")
    if int(pytest.importorskip("setuptools").__version__.split(".")[0]) < 77:
        pytest.skip("setuptools 77 is needed")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "kvtool").mkdir()
    for name in ("__init__.py", "version.py"):
        (tmp_path / "kvtool" / name).write_bytes((ROOT / "kvtool" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    folder = build_meta.prepare_metadata_for_build_wheel(str(tmp_path / "out"))
    found = message_from_string((tmp_path / "out" / folder / "METADATA").read_text("utf-8"))
    assert found["Version"] == kvtool.__version__
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == index_page().strip()


def test_the_changelog_begins_with_what_is_not_released():
    """A version that is released has its own heading, with the day."""
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)", title) for title in titles]
    if "dev" in kvtool.__version__:
        assert titles[0] == "Unreleased"
        assert all(released[1:])
        versions = [match[1] for match in released[1:]]
        assert kvtool.__version__.partition(".dev")[0] not in versions
    else:
        assert released[0][1] == kvtool.__version__


def read_yaml(path: str):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_workflows_run_the_gate_and_publish_without_a_password():
    gate, publish = (read_yaml(f".github/workflows/{name}.yml") for name in ("gate", "publish"))
    for jobs in (gate["jobs"]["gate"], publish["jobs"]["build"]):
        assert ".ci/run" in [step.get("run") for step in jobs["steps"]]
        assert jobs["steps"][1]["with"]["python-version"] == "3.11"
    assert publish[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    job = publish["jobs"]["publish"]
    assert job["needs"] == "build"
    assert job["permissions"] == {"id-token": "write"}
    assert "password" not in str(publish["jobs"])
    assert publish["permissions"] == gate["permissions"] == {"contents": "read"}


def test_publishing_refuses_a_tag_of_another_version():
    steps = read_yaml(".github/workflows/publish.yml")["jobs"]["build"]["steps"]
    (check,) = [step["run"] for step in steps if step.get("name") == "The tag is the version"]
    program = re.search(r"python -c '(.*?)'", check)[1]
    names: dict = {}
    exec(program.replace("print(", "found = (").replace("kvtool/", f"{ROOT}/kvtool/"), names)
    assert names["found"] == kvtool.__version__
