"""Errors about numbers of a document that contradict each other, at the place of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvtool.documents.tree import Keys

if TYPE_CHECKING:
    from pydantic_core import InitErrorDetails


def disagreement(keys: Keys, given: Any, message: str) -> ValidationError:
    """Return what a validator of a whole document raises to point at one value in it.

    Args:
        keys: the way to the value.
        given: the value.
    """
    error: InitErrorDetails = {
        "type": "value_error",
        "loc": keys,
        "input": given,
        "ctx": {"error": ValueError(message)},
    }
    return ValidationError.from_exception_data("document", [error])
