"""Compress every call of a model's `generate`: inside a block, or for good."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from kvtool.cache.build import build_cache, read_plan
from kvtool.cache.hooks import attach as hooks
from kvtool.cache.hooks.attachment import attachment, uncompiled
from kvtool.cache.hooks.blocks import CacheMaker
from kvtool.cache.hooks.generate_calls import LOCK, GenerateCalls
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError, UsageError
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget

Plan = PlanDocument | dict | str | Path


def attach(
    model: PreTrainedModel,
    policy: Policy | str | None = None,
    budget: Budget | str | int | float | None = None,
    *,
    prefill: str = "full",
    plan: Plan | None = None,
) -> PreTrainedModel:
    """Make a model run kvtool's attention; with a policy, compress every `generate` for good.

    `detach` undoes both. Every call gets a cache of its own, unless it brings one
    (`past_key_values=build_cache(..)`); a used cache with a text that does not go on from it is
    refused. Families without transformers' attention interface (Falcon, GPT-J) keep their own eager
    attention, watched by hooks: the same policies, but a prompt's weights are held in full while it
    runs.

    Args:
        policy, budget, prefill, plan: as `build_cache` takes them; no policy: a call without a
            cache keeps everything.

    Returns:
        The model.

    Raises:
        UsageError: a budget or plan without a policy; as `build_cache`.
        KvtoolError: the model's attention cannot be replaced, or its layers cannot be compressed.
    """
    if policy is None:
        if budget is not None or plan is not None:
            given = "a plan" if budget is None else f"budget {budget}"
            raise UsageError(f"{given} needs a policy", hint='policy="h2o+caote"')
        return hooks.attach(model)
    inner = uncompiled(model)
    with LOCK:
        maker = _maker(inner, policy, budget, prefill, plan)
        _calls(inner).set_maker(maker)
    return model


@contextmanager
def compressed(
    model: PreTrainedModel,
    policy: Policy | str,
    budget: Budget | str | int | float | None = None,
    *,
    prefill: str = "full",
    plan: Plan | None = None,
) -> Iterator[PreTrainedModel]:
    """Give every `generate` and pipeline call inside a fresh cache of its own.

    Blocks inside blocks restore the outer one, and at the end the model is what it was. A call that
    brings a cache keeps it. Coroutines and generators may each open a block of their own over one
    model: a call gets the policy of the block that it is made in, also through `asyncio.to_thread`.
    Calls of threads that were not handed the context (a streamer's, `run_in_executor`) get the
    policy of the open blocks. Such a call is refused where open blocks differ, and so are blocks of
    several threads that ask for different policies.

    Args:
        policy, budget, prefill, plan: as `build_cache` takes them.

    Yields:
        The model.

    Raises:
        UsageError: another thread compresses this model's calls otherwise; as `build_cache`. A call
            inside raises it where it could belong to several blocks that differ.
        KvtoolError: the model's attention cannot be replaced, or its layers cannot be compressed.
    """
    inner = uncompiled(model)
    with LOCK:
        detach = hooks.detach if attachment(inner) is None else None
        try:
            maker = _maker(inner, policy, budget, prefill, plan)
            calls = _calls(inner)
        except BaseException:
            if detach is not None:
                detach(inner)
            raise
        block = calls.open_block(maker, sys._getframe(), detach)
    try:
        yield model
    finally:
        calls.close_block(block)


def _maker(
    model: PreTrainedModel,
    policy: Policy | str,
    budget: Budget | str | int | float | None,
    prefill: str,
    plan: Plan | None,
) -> CacheMaker:
    """Check a request by making a cache of it."""
    policy = parse_policy(policy)
    if policy.repetition is not None:
        raise UsageError(
            f"`{policy.score.name}` has a prompt repeated before it is cut, "
            "and `generate` of transformers reads it once",
            hint="kvtool.compress(..), then kvtool.generate(.., cache=cache)",
        )
    plan = None if plan is None else read_plan(plan)
    make = functools.partial(build_cache, policy=policy, budget=budget, prefill=prefill, plan=plan)
    return CacheMaker(make(model).settings, make)


def _calls(model: PreTrainedModel) -> GenerateCalls:
    calls = GenerateCalls.of(model)
    if calls is None:
        hooks.detach(model)
        raise KvtoolError(f"`{type(model).__name__}` generates no text, so it has no calls")
    return calls
