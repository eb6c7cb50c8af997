"""Triton's interpreter takes the bits of bfloat16 for integers; here it takes them for numbers.

It multiplies them, and turns whole numbers into them, as if they were uint16.
"""

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def take_bfloat16_for_numbers():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from triton.language import bfloat16

    builder = interpreter.InterpreterBuilder
    plain, plain_cast = builder.create_dot, builder.create_si_to_fp

    def as_float(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, as_float(a), as_float(b), *rest)

    def create_si_to_fp(self, number, dtype):
        if dtype.scalar != bfloat16:
            return plain_cast(self, number, dtype)
        in_full = plain_cast(self, number, interpreter.tl.float32)
        return self.create_fp_trunc(in_full, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "create_si_to_fp", create_si_to_fp)
        yield
