"""Policies as people read them: all in tables, or one in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvtool.calls.check_policy import PolicyReport
    from kvtool.policies.table import About, Entry

_KEEPS_ALL = "full"
_NARROWEST, _WIDEST = 100, 120  # letters of a line between which columns are easy to read


@dataclass(frozen=True)
class AllPolicies:
    """A table of bases for each meaning of their budget, and one of modifiers.

    Where a terminal is too narrow for columns, policies are printed one below another.
    """

    entries: Sequence[Entry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _NARROWEST
        for part in self._in_columns() if wide else self._in_blocks():
            yield Constrain(part, _WIDEST)

    def _in_columns(self) -> Iterator[RenderableType]:
        name = max(len(entry.name) + 1 for entry in self.entries)
        for kind, bases in self._bases().items():
            table = _table(name, "policy", "keeps")
            for each in bases:
                table.add_row(each.name, each.summary, _spell(each.parameters), _paper(each))
            yield Group(Text(f"budget: {kind}", style="italic"), table, Text())
        taken = [base for each in self._modifiers() for base in each.goes_on]
        longest = max(map(len, taken), default=1)  # no name is broken
        table, evicting = _table(name, "modifier", "does", longest), self._evicting()
        for each in self._modifiers():
            cells = (each.summary, _spell(each.parameters), _taken(each, evicting), _paper(each))
            table.add_row(f"+{each.name}", *cells)
        yield table
        yield Text(f"\nall that evict: {' '.join(evicting)}")
        yield Text("One in full: kvtool policies NAME. Papers are numbers on arxiv.org.")

    def _in_blocks(self) -> Iterator[RenderableType]:
        for kind, bases in self._bases().items():
            yield Text(f"budget: {kind}", style="italic")
            yield from (_block(each.name, each, []) for each in bases)
            yield Text()
        evicting = self._evicting()
        for each in self._modifiers():
            yield _block(f"+{each.name}", each, [f"goes on {_taken(each, evicting)}"])
        yield Text(f"\nall that evict: {' '.join(evicting)}")
        yield Text("One in full: kvtool policies NAME.")

    def _bases(self) -> dict[str, list[Entry]]:
        """Return the bases by what their budget is."""
        bases = [entry for entry in self.entries if entry.kind == "base"]
        kinds = dict.fromkeys(map(_kind, bases))
        return {kind: [entry for entry in bases if _kind(entry) == kind] for kind in kinds}

    def _modifiers(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == "modifier"]

    def _evicting(self) -> list[str]:
        """Return the bases that most modifiers of evicting policies go on, as they are spelled."""
        plain = (
            [name for name in each.goes_on if "(" not in name]
            for each in self._modifiers()
            if _KEEPS_ALL not in each.goes_on  # codecs, which need no eviction
        )
        return max(plain, key=len)


def _kind(base: Entry) -> str:
    """Say what a base's budget is, and which package it comes from where that is not kvtool."""
    return base.budget_kind + ("" if base.origin == "kvtool" else f"; from {base.origin}")


def one_policy(about: About) -> RenderableType:
    """Lay out all that is known of one."""
    entry = about.entry
    parts: list[RenderableType] = [_title(_sign(entry), entry)]
    if about.settings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("parameter", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for each in about.settings:
            values = f" [{' | '.join(map(_value, each.values))}]" if each.values else ""
            table.add_row(each.name, _value(each.default), Text(f"{each.meaning}{values}"))
        parts += [Text(), table]
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("budget", entry.budget_kind)
    if entry.kind == "modifier":
        facts.add_row("goes on", " ".join(entry.goes_on))
    else:
        for spelled in dict.fromkeys(about.takes.values()) or (entry.name,):
            taken = [f"+{name}" for name, base in about.takes.items() if base == spelled]
            facts.add_row(f"{spelled} takes", " ".join(taken) or "no modifier")
    facts.add_row("paper", entry.paper)
    if entry.origin != "kvtool":
        facts.add_row("from", entry.origin)
    parts += [Text(), facts]
    for paragraph in about.text.split("\n\n"):
        parts += [Text(), Text(" ".join(paragraph.split()))]
    return Constrain(Group(*parts), _WIDEST)


def checked_policy(report: PolicyReport) -> RenderableType:
    """Lay out what became of each check."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("why", overflow="fold")
    seen: set[str] = set()
    for each in report.checks:
        again = each.outcome == "failed" and each.detail in seen
        table.add_row(each.name, each.outcome, Text("the same" if again else each.detail))
        seen.add(each.detail)
    budget = "" if report.budget is None else f", budget {report.budget}"
    return Constrain(Group(Text(f"{report.policy}{budget}", style="bold"), Text(), table), _WIDEST)


def _table(width: int, first: str, second: str, goes_on: int | None = None) -> Table:
    """Make a table whose columns are aligned with those of another one."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column(first, no_wrap=True, width=width)
    table.add_column(second, overflow="fold", ratio=8)
    table.add_column("parameters", overflow="fold", ratio=7)
    if goes_on is not None:
        table.add_column("goes on", overflow="fold", ratio=7, width=goes_on)
    table.add_column("paper", no_wrap=True, width=10)
    return table


def _block(name: str, entry: Entry, more: Sequence[str]) -> RenderableType:
    """Write a policy in lines of its own."""
    texts = [_spell(entry.parameters), *more, "" if entry.paper == "-" else entry.paper]
    lines = [Padding(Text(each), (0, 0, 0, 4)) for each in texts if each]
    return Group(_title(name, entry), *lines)


def _title(name: str, entry: Entry) -> Text:
    return Text.assemble((name, "bold"), f" - {entry.summary}")


def _sign(entry: Entry) -> str:
    return f"+{entry.name}" if entry.kind == "modifier" else entry.name


def _spell(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in parameters.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _taken(entry: Entry, evicting: Sequence[str]) -> str:
    """Say what a modifier goes on, by what it does not go on where that is shorter."""
    missing = [base for base in evicting if base not in entry.goes_on]
    besides = [base for base in entry.goes_on if base not in evicting]
    most = "all that evict" + (f" but {' '.join(missing)}" if missing else "")
    most += f", and {' '.join(besides)}" if besides else ""
    return min(most, " ".join(entry.goes_on), key=len)


def _paper(entry: Entry) -> str:
    """Return the number of a paper on arXiv, else whose page it is on."""
    place = urlsplit(entry.paper)
    if place.hostname is None:
        return entry.paper
    if place.hostname == "arxiv.org":
        return place.path.rpartition("/")[2]
    return place.hostname.partition(".")[0]
