"""Write documents as YAML that our reader gives back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

import yaml

from kvtool.documents.readers import read_plain
from kvtool.errors import printable
from kvtool.sizes import WIDTH

_STEP = "  "


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which knows the scalars of YAML 1.1: text such as `1e-5` needs quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out, instead of naming the first and pointing at it."""
        return True

    def expect_flow_sequence_item(self) -> None:
        """Begin a new line before a number that would cross the width, not after it."""
        event, width = self.event, self.best_width
        if isinstance(event, yaml.ScalarEvent):
            self.best_width -= len(event.value) + len(",  ")
        super().expect_flow_sequence_item()
        self.best_width = width


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    text = printable(text)
    style = None if _is_text(text) else "'"
    if not text.replace("\n", "").isprintable():
        style = '"'  # the only one that escapes
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_text(text: str) -> bool:
    try:
        return isinstance(read_plain(text), str)
    except ValueError:
        return False


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    given = [item for item in items if item is not None]
    flow = bool(given) and all(type(item) in (int, float) for item in given)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(
    data: Any, units: Mapping[tuple[str, ...], str] | None = None, width: int = WIDTH
) -> str:
    """Write dictionaries, lists and scalars as YAML, in their order; lists of numbers in lines.

    >>> print(dump_yaml({"stop": ["1e-5", "on"], "seed": 0, "tokens": [205, None]}), end="")
    stop:
    - '1e-5'
    - 'on'
    seed: 0
    tokens: [205, null]

    Args:
        units: comments by the keys that lead to a value.
    """
    if not units:
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    parts = []
    for key, value in data.items():
        below = {keys[1:]: unit for keys, unit in units.items() if keys[0] == key}
        unit = below.pop((), None)
        if below and value:
            inner = dump_yaml(value, below, width - len(_STEP))
            parts.append(f"{key}:\n{indent(inner, _STEP)}")
        else:
            text = dump_yaml({key: value}, None, width)
            parts.append(text if unit is None else _remark(text, unit, width))
    return "".join(parts)


def _remark(text: str, unit: str, width: int) -> str:
    """Put a comment behind the first line of a value, or above it where the line is too long."""
    first, rest = text.split("\n", 1)
    line = f"{first}  # {unit}"
    wrapped = bool(rest) and not first.endswith(":")
    return f"# {unit}\n{text}" if wrapped or len(line) > width else f"{line}\n{rest}"
