"""Triton's interpreter multiplies the bits of bfloat16 as integers; here it does as numbers."""

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def multiply_bfloat16_as_numbers():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from triton.language import bfloat16

    plain = interpreter.InterpreterBuilder.create_dot

    def as_float(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, as_float(a), as_float(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
