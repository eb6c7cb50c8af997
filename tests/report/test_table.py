"""One table, shown by a terminal, and by the page and a notebook."""

from html.parser import HTMLParser

from rich.console import Console

from kvtool.report.table import Cell, Column, Note, Row, Table
from kvtool.report.templates import html_table
from kvtool.report.terminal import rich_table

COLUMNS = [
    Column("variant", words=True),
    Column("niah", "exact match", short="niah\nem", group="a"),
    Column("task", words=True, group="b"),
]
TABLE = Table(
    COLUMNS,
    [
        Row("full", [Cell("1.000"), Cell("[b]x[/b]")], first=True),
        Row(
            "h2o@64",
            [
                Cell("0.5", (Note("±0.1"), Note("-0.5", "worse"))),
                Cell("<i>"),
            ],
            first=True,
        ),
        Row("h2o@128", [Cell("0.75", (Note("0"),)), Cell("y", look="better")]),
    ],
)


def on_a_terminal(shown, width=80, colour=False):
    console = Console(
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        _environ={},
    )
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


class Cells(HTMLParser):
    """The text of each cell below the head."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], False
        self.feed(text[text.index("<tbody>") :])

    def handle_starttag(self, tag, attributes):
        self._open = self._open or tag in ("td", "th")
        if tag in ("td", "th"):
            self.found.append("")

    def handle_endtag(self, tag):
        self._open = self._open and tag not in ("td", "th")

    def handle_data(self, data):
        if self._open:
            self.found[-1] += data


def test_both_show_the_same_cells():
    on_page = Cells(html_table(TABLE)).found
    assert on_page[3:6] == ["h2o@64", "0.5 ±0.1 -0.5", "<i>"]
    lines = on_a_terminal(rich_table(TABLE)).splitlines()
    [line] = [line for line in lines if line.split()[:1] == ["h2o@64"]]
    assert line.split() == ["h2o@64", "0.5±0.1", "-0.5", "<i>"]
    assert "[b]x[/b]" in on_page
    assert any("[b]x[/b]" in line for line in lines)


def test_shares_are_colours_of_the_scale():
    cells = [Cell("0.00", share=0.0), Cell("1.00", share=1.0)]
    heat = Table(
        [Column("depth"), Column("8"), Column("16")], [Row("0%", cells)], "h2o", dense=True
    )
    text = on_a_terminal(rich_table(heat), colour=True)
    assert "\x1b[37;48;2;0;34;78m 0.00\x1b[0m" in text
    assert "\x1b[30;48;2;254;232;56m 1.00\x1b[0m" in text
