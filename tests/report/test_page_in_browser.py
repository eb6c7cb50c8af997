"""The page of a run as a browser shows it: nothing runs out of it, every word is legible."""

import pytest

from kvtool.report.page import write_page
from tests.browser import ask
from tests.report.examples import document, ppl

SHOWN = """
const light = colour => {
  const [r, g, b] = colour.map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const parts = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const paper = element => {
  for (let at = element; at; at = at.parentElement) {
    const found = parts(getComputedStyle(at).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
  }
  return [255, 255, 255];
};
const onScale = ["rgb(1, 1, 1)", "rgb(254, 254, 254)"];  // numbers in cells of a heat map
const faint = [...document.querySelectorAll("main *")]
  .filter(each => [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
  .map(each => {
    const style = getComputedStyle(each);
    const ink = each.closest("svg") ? style.fill : style.color;
    const [low, high] = [light(parts(ink).slice(0, 3)), light(paper(each))].sort((a, b) => a - b);
    return [each.textContent.trim().slice(0, 40), ink, (high + 0.05) / (low + 0.05)];
  })
  .filter(([, ink, contrast]) => !onScale.includes(ink) && contrast < 4.5);
const figures = [...document.querySelectorAll("figure svg")];
return {
  faint,
  wider: document.documentElement.scrollWidth - innerWidth,
  pictures: figures.map(each => each.getBoundingClientRect().right <= innerWidth),
  shown: figures.map(each => each.getBoundingClientRect().height > 100),
  paper: getComputedStyle(document.body).backgroundColor,
  first: document.querySelector("figcaption").textContent,
  letters: Math.min(...figures.slice(0, 2).map(each => {
    const text = each.querySelector("text");
    return text.getBoundingClientRect().height;
  })),
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("matplotlib")
    run = document(("niah", "fidelity", "ppl"), ("h2o", "h2o+int8", "full+int8", "snapkv", "quest"))
    variants = [
        variant.model_copy(update={"reads": variant.policy == "quest"}) for variant in run.variants
    ]
    results = [ppl(variant, ("snapkv",)) for variant in variants]
    results = [each for each in run.results if each.task != "ppl"] + results
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(run.model_copy(update={"variants": variants, "results": results}), path)
    return path


@pytest.mark.exhaustive
@pytest.mark.each_once
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 700])
def test_the_page_fits_and_every_word_is_legible(page, width, dark):
    found = ask(page, SHOWN, width=width, dark=dark)
    assert found["wider"] <= 0
    assert len(found["pictures"]) == 6
    assert all(found["pictures"])
    assert all(found["shown"])
    assert found["letters"] >= 9  # pixels
    assert found["first"].startswith("Score by bytes held")
    assert found["paper"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert found["faint"] == []
