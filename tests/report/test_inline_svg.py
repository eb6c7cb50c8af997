import re
import xml.etree.ElementTree as ElementTree

from kvtool.package_data import data_file
from kvtool.report.colour_scale import INK
from kvtool.report.page import inline_svg
from kvtool.report.panels import FRONT, GRID

SVG = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "x" "http://www.w3.org/x.dtd">
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="36pt" viewBox="0 0 72 36"
 xmlns="http://www.w3.org/2000/svg" version="1.1">
 <defs><style type="text/css">*{stroke: red}</style>
  <clipPath id="p1"><rect/></clipPath><path id="m1"/></defs>
 <g id="axes_1" clip-path="url(#p1)"><use xlink:href="#m1"/><text>a &lt; b</text></g>
</svg>
"""


def test_black_white_and_greys_are_the_pages_and_other_colours_stay():
    styles = "fill: #ffffff; stroke: #000000", f"stroke: {GRID}", f"stroke: {FRONT}; fill: #0072b2"
    drawn = SVG.replace("<rect/>", "".join(f'<path style="{style}"/>' for style in styles))
    found = re.findall(r'<path style="([^"]+)"', inline_svg(drawn, "p", "x"))
    assert found == [
        "fill: var(--paper); stroke: currentColor",
        "stroke: var(--line)",
        "stroke: var(--front); fill: #0072b2",
    ]
    sheet = data_file("report/page.css").read_text()
    assert all(sheet.count(f"{name}:") == 3 for name in ("--paper", "--line", "--front"))
    assert not set(INK.values()) & {"#000000", "#ffffff"}  # numbers on colours of the scale stay


def test_an_svg_keeps_its_references_under_a_prefix():
    inline = inline_svg(SVG, "p7", 'a "b" <c>')
    root = ElementTree.fromstring(inline)
    ids = {node.get("id") for node in root.iter() if node.get("id")}
    assert ids == {"p7-p1", "p7-m1", "p7-axes_1"}
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", inline))
    assert {name for pair in used for name in pair if name} == {"p7-p1", "p7-m1"}
    assert root.get("viewBox") == "0 0 72 36"
    assert root.get("width") == "72pt"
    assert root.get("aria-label") == 'a "b" <c>'
    assert root.find("g/text").text == "a < b"
    assert "http" not in inline
    assert "style" not in inline
