"""The role of a codec: how the key and the value of a slot are written down in fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import Role

if TYPE_CHECKING:  # counting bytes needs no torch
    from kvtool.maths.quantise import RandomRotation

SCALE_BYTES = 2  # float16
RANGE_BYTES = 3  # of a channel of the keys of one head: float16 and int8


class Codec(Role):
    """A way to store keys and values; a slot is quantised when it is written, and never again.

    Most store both alike. Another one returns those of keys and of values in `sides`, which have
    the attributes and methods below.

    Attributes:
        code_bits: of one channel.
        kernel_form: the form in `kvtool.kernels.checks.CODES` in which kernels read codes; None:
            plain torch reads them. A class that writes its own `decode` names its own form.
    """

    code_bits: ClassVar[int] = 8
    kernel_form: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "decode" in vars(cls) and "kernel_form" not in vars(cls):
            cls.kernel_form = None  # a kernel would read the codes as the base does

    def sides(self) -> tuple[Codec, Codec]:
        """Return the codec of keys and that of values."""
        return self, self

    @property
    def key_bits(self) -> int:
        """Return the bits of a channel of keys."""
        return self.sides()[0].code_bits

    def shortest(self) -> Codec:
        """Return the same codec under the shortest of its names."""
        return self

    def check_dim(self, dim: int) -> None:
        """Refuse keys or values of `dim` channels, if they cannot be stored.

        Raises:
            UsageError: they cannot.
        """

    def check_device(self, device: str) -> None:
        """Refuse a device whose torch cannot make the codes.

        Raises:
            UsageError: it cannot.
        """

    def scales(self, dim: int) -> int:
        """Count the scales of a key or value of `dim` channels."""
        return 1

    def vector_bytes(self, dim: int) -> int:
        """Count the bytes of codes and scales of a key or value of `dim` channels."""
        return dim * self.code_bits // 8 + SCALE_BYTES * self.scales(dim)

    def rotation(self, layer: int, dim: int, device: torch.device) -> RandomRotation | None:
        """Return what vectors of a layer are rotated by before they are rounded; None: nothing."""
        return None

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Round vectors, (.., dim), that have been rotated.

        Returns:
            Codes of one byte, (.., dim * code_bits / 8), and scales, (.., scales) float16. Scales
            of a `kernel_form` are at least 0: the signs of those of keys are kvtool's.
        """
        raise NotImplementedError

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Bring rotated vectors back: (.., dim) float32."""
        raise NotImplementedError
