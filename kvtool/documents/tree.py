"""Values that remember where they stand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvtool.documents.problems import Mark

DEEPEST = 64
"""Levels of mappings and lists that a document may have."""


@dataclass(frozen=True)
class Node:
    """A value and where it stands.

    Attributes:
        value: a scalar, a dictionary of nodes or a list of nodes.
        mark: where the value begins.
        key: where its key begins, None for list items and the top.
    """

    value: Any
    mark: Mark
    key: Mark | None = None

    @classmethod
    def of(cls, data: Any, mark: Mark) -> Node:
        """Make a tree of plain data, all of which stands at `mark`."""
        if isinstance(data, dict):
            return cls({key: replace(cls.of(data[key], mark), key=mark) for key in data}, mark)
        if isinstance(data, (list, tuple)):
            return cls([cls.of(item, mark) for item in data], mark)
        return cls(data, mark)

    @property
    def data(self) -> Any:
        """Plain dictionaries, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.data for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.data for node in self.value]
        return self.value

    @property
    def depth(self) -> int:
        """Levels of mappings and lists below this value, 0 of a scalar."""
        if isinstance(self.value, dict):
            inside = list(self.value.values())
        else:
            inside = self.value if isinstance(self.value, list) else []
        below = max((node.depth for node in inside), default=0)
        return below + isinstance(self.value, (dict, list))

    def child(self, key: str | int) -> Node | None:
        """Return what stands under a key or an index, None if there is nothing."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def without_lines(self) -> Node:
        """Return a copy whose lines are not shown in errors."""
        value = self.value
        if isinstance(value, dict):
            value = {key: node.without_lines() for key, node in value.items()}
        elif isinstance(value, list):
            value = [node.without_lines() for node in value]
        key = None if self.key is None else replace(self.key, shown=False)
        return Node(value, replace(self.mark, shown=False), key)

    def with_child(self, key: str | int, node: Node) -> Node:
        """Return a copy in which `node` stands under a key, or at an index (the end included)."""
        if isinstance(self.value, dict):
            return replace(self, value={**self.value, key: node})
        at = int(key)
        return replace(self, value=[*self.value[:at], node, *self.value[at + 1 :]])

    def without_child(self, key: str | int) -> Node:
        """Return a copy without what stands under a key or an index."""
        if isinstance(self.value, dict):
            return replace(self, value={k: node for k, node in self.value.items() if k != key})
        at = int(key)
        return replace(self, value=[*self.value[:at], *self.value[at + 1 :]])
