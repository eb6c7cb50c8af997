"""What readers by pages have in common: bounds of the keys of each page, kept up in place."""

from collections.abc import Mapping

from torch import Tensor

from kvtool.maths.pages import page_bounds, pages_of, widen_page
from kvtool.policies.numbers import State
from kvtool.policies.parts import Read
from kvtool.policies.read.view import Stored, fixed


class Paged(Read):
    """A reader whose table is the smallest and largest key of each page.

    Attributes:
        page: tokens per page; None until the sizes are fixed.
    """

    page: int | None

    @property
    def page_size(self) -> int:
        """Return the tokens per page, once they are fixed."""
        return fixed(self.page)

    def start(self, stored: Stored) -> State:
        return {"bounds": page_bounds(stored.keys, self.page_size)}

    def columns(self, tokens: int) -> Mapping[str, int]:
        return {"bounds": pages_of(tokens, self.page_size)}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        widen_page(tables["bounds"], key, at, self.page_size)
