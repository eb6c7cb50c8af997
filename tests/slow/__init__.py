"""Slow, obvious twins: policies as loops, and a model run that evicts by leaving keys out.

Nothing here imports kvtool. One batch row, written from the formulas.
"""
