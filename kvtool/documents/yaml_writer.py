"""YAML that our reader gives back as it was."""

from __future__ import annotations

from typing import Any

import yaml

from kvtool.documents.scalars import read_plain


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which knows the scalars of YAML 1.1: text such as `1e-5` needs quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out, instead of naming the first and pointing at it."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(_read(text), str) else "'"
    if not text.replace("\n", "").isprintable():
        style = '"'  # the only one that escapes
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _read(text: str) -> Any:
    try:
        return read_plain(text)
    except ValueError:
        return None


_Dumper.add_representer(str, _represent_text)


def dump_yaml(data: Any) -> str:
    """Write dictionaries, lists and scalars as YAML, in their order.

    >>> print(dump_yaml({"stop": ["1e-5", "on"], "seed": 0}), end="")
    stop:
    - '1e-5'
    - 'on'
    seed: 0
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
