"""Slots with other bits for keys than for values: 8 or 4 each, in the formats of int8 and int4.

Keys need more bits than values: an error of a key moves the logits, and with them the weights of
all tokens, while an error of a value is averaged under the weights. `k8v4` is the short form for
keys of 8 bits and values of 4; `int8` and `int4` are those of both alike. A slot takes the bytes of
a key in one format and of a value in the other: 2.5 times less than bfloat16 for `k8v4`.

Vectors of 4 bits are rotated before they are rounded, and those of 8 bits are not. Queries are
rotated where keys have 4 bits, and outputs are rotated back where values have. Latent attention
(MLA) has no values of its own: its latent takes the format of keys, its rotated key that of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.codec.codec import Codec
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class Int(Codec):
    """Store keys and values as whole numbers of 8 or 4 bits each.

    Args:
        keys: bits of a channel of keys, 8 or 4.
        values: bits of a channel of values, 8 or 4.
        rotate: whether vectors of 4 bits are rotated before they are rounded.
    """

    keys: int = limited(8, "4 or 8")
    values: int = limited(4, "4 or 8")
    rotate: bool = True

    name: ClassVar = "int"
    paper: ClassVar = "-"

    def sides(self) -> tuple[Codec, Codec]:
        of_bits = {8: Int8(), 4: Int4(self.rotate)}
        return of_bits[self.keys], of_bits[self.values]

    def shortest(self) -> Codec:
        of_keys, of_values = self.sides()
        if of_keys == of_values:
            return of_keys
        return K8V4(self.rotate) if self.keys == 8 else self


@dataclass(frozen=True)
class K8V4(Codec):
    """Store keys as whole numbers of 8 bits, and values as rotated ones of 4.

    Args:
        rotate: whether values are rotated before they are rounded.
    """

    rotate: bool = True

    name: ClassVar = "k8v4"
    paper: ClassVar = "-"

    def sides(self) -> tuple[Codec, Codec]:
        return Int8(), Int4(self.rotate)
