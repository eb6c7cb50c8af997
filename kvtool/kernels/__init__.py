"""Attention that also counts what policies need to know, in Triton, for CUDA devices.

Elsewhere, and without Triton, plain torch computes the same: `kvtool.cache.steps.attend`. Modules
that define kernels import Triton, so they are imported only once `kvtool.kernels.trust.usable` has
said yes.
"""
