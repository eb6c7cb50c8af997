"""Slow twins: every policy again, from its formula, in plain Python loops over lists.

Nothing here imports kvtool. One object of `policies.py` is one policy in one layer; `oracle.py`
runs a model on a full cache and attends to what that object would have kept.
"""
