"""The twin of slots that hold codes: slots of floats which have been through the codec."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvtool.cache.storage import layer
from kvtool.cache.storage.form import CodedForm, Form
from kvtool.policies.grammar import parse_policy


class DecodedForm(Form):
    """Slots of floats that have been through a codec."""

    def __init__(self, coded, keys, values):
        super().__init__(keys, values)
        self.coded = coded

    def encode(self, keys, values):
        keys, values = self.coded.decode(self.coded.encode(keys, values))
        return {"keys": keys, "values": values}


@contextmanager
def decoded_slots(codec: str) -> Iterator[None]:
    """Have all slots that are made inside hold what a codec makes of the numbers, in float."""
    part = parse_policy(f"full+{codec}").codec

    def make_form(_none, index, keys, values):
        return DecodedForm(CodedForm(part, index, keys, values), keys, values)

    with mock.patch.object(layer, "make_form", make_form):
        yield
