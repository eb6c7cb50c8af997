"""Make a cache for a model, or have every call of `generate` make one: in a block, or for good."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.hooks import attach as hooks
from kvtool.cache.hooks.attachment import attachment, uncompiled
from kvtool.cache.hooks.blocks import CacheMaker
from kvtool.cache.hooks.generate_calls import LOCK, GenerateCalls
from kvtool.cache.hooks.modules import find_projections, show_hidden
from kvtool.cache.hooks.probes import find_query_rotations, find_rotations, rank_model
from kvtool.cache.hooks.rope import length_rope
from kvtool.cache.slots.tensor_parallel import shards_of
from kvtool.cache.tensor_files.heads import read_centres
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.layers import attention_layers, check_layers, check_shared
from kvtool.cache.whole.settings import ModelLink
from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import read_as
from kvtool.errors import KvtoolError, KvtoolWarning, UsageError
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import FREE, layer_kinds, layer_shapes
from kvtool.planning.budgets import planned_heads
from kvtool.planning.bytes import check_dims
from kvtool.planning.plan_in_use import check_plan, check_run
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.evidence import QueryCentres
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy, check_blocks
from kvtool.sizes import Budget, parse_prefill


def build_cache(
    model: PreTrainedModel,
    policy: Policy | str,
    budget: Budget | str | int | float | None = None,
    *,
    prefill: str = "full",
    plan: PlanDocument | dict | str | Path | None = None,
    head_ranks: Tensor | None = None,
) -> KVCache:
    """Make an empty cache for a model, which runs kvtool's attention from then on; see `attach`.

    Args:
        model: a decoder of transformers.
        policy: what stays, as a value or a policy string.
        budget: tokens per layer and KV head (int, `4K`), share of the prompt (float, `20%`) or
            bytes held by the whole cache, the policy's own numbers included (`64MiB`). None only
            for policies that keep everything. For readers (`quest` and its like, `rocketkv`) tokens
            and shares are not what is stored but what a decoded token reads, in pairs of key and
            value.
        prefill: `full` runs a prompt at once, `block:M` in blocks of M tokens, cutting after each;
            `block` is 128 tokens, or 2048 on a CUDA device; 512 for `kvzip`, which repeats each
            block before the cut. A policy that looks at the prompt to
            split the budget (`+d2o-alloc`, `+ada`), or whose queries vote by its length
            (`pyramidinfer`), reads it at once and cuts at its end. One that scores by the model's
            logits (`sirllm`) reads it in blocks in any case.
        plan: what `kvtool plan-budget` decided, or its file: budgets of the layers and RocketKV's
            stages, in place of `budget` and of the policy's own allocator.
        head_ranks: (attention layers, kv_heads) integers, 0 for the head that most needs the whole
            text, for a policy that ranks heads (duoattention); None: as the policy says.

    Raises:
        UsageError: no budget, or one that the policy's protected tokens fill; a prefill that cannot
            be read; a plan beside a budget, one of another model, or one whose bytes this
            policy or dtype would exceed; head scores that do not fit; a codec that cannot store the
            model's heads, or not on its device.
        KvtoolError: a model whose layers cannot be compressed.
    """
    plan = None if plan is None else read_plan(plan)
    return make_cache(model, policy, budget, prefill=prefill, plan=plan, head_ranks=head_ranks)


def make_cache(
    model: PreTrainedModel,
    policy: Policy | str,
    budget: Budget | str | int | float | None,
    *,
    prefill: str,
    plan: PlanDocument | None,
    head_ranks: Tensor | None = None,
) -> KVCache:
    """Do what `build_cache` does, with a plan that has been read."""
    model, policy = uncompiled(model), parse_policy(policy)
    config = model.config.get_text_config(decoder=True)
    check_layers(config)
    check_codec(model, policy)
    if plan is not None:
        if budget is not None:
            raise UsageError(f"a plan brings its own budget; leave out {budget}")
        check_plan(plan, model.config)
        check_planned_layers(plan, policy)
        check_run(plan, policy, model.config, str(model.dtype).removeprefix("torch."))
        budget = plan.target.budget
        policy = planned_heads(policy, plan)
    check_shared(config, policy)
    if policy.takes_budget and not any(kind in FREE for kind in layer_kinds(config)):
        warnings.warn(
            f"no layer of `{config.model_type}` lets policy `{policy}` evict: each keeps its own "
            "window",
            KvtoolWarning,
            stacklevel=2,
        )
    request = None if budget is None else Budget.parse(budget)
    if not policy.takes_budget:
        request = None
    elif request is None:
        raise UsageError(f"policy `{policy.name}` needs a budget, such as 512, 20% or 64MiB")
    elif request.share is not None:
        request.for_prompt(1)  # refuses it
    elif request.tokens is not None:
        policy.check_budget(request.tokens)
    block = parse_prefill(prefill, device=str(model.device), own=policy.own_block)
    check_blocks(policy, block)
    if policy.repetition is not None and block is not None:
        least = policy.repetition.least_block
        if block < least:
            warnings.warn(
                f"blocks of {block} tokens cost `{policy}` answers: each is scored by itself; "
                f"take {least} or more",
                KvtoolWarning,
                stacklevel=2,
            )
    hooks.attach(model)
    split, layers, name = policy.head_split, attention_layers(config), policy.score.name
    rotations: dict[int, Rotation | None] = {}
    centres: dict[int, QueryCentres] = {}
    if policy.score.positions == "cache":
        found = find_rotations(model, layers, "positions=cache")
        rotations = dict(zip(layers, found, strict=True))
    elif policy.moments is not None:
        found = find_query_rotations(model, layers, f"policy `{name}`")
        rotations = dict(zip(layers, found, strict=True))
        if policy.moments.stats is not None:
            shapes = layer_shapes(model.config)
            centres = read_centres(policy.moments.stats, name, shapes, rotations)
    if split is None or split.scores is None:
        head_ranks = None
    elif head_ranks is None:
        head_ranks = rank_model(model, split.scores)
    looks = policy.sees_hidden or policy.repeats_by_output
    link = ModelLink(
        model=weakref.ref(model),
        shards=shards_of(model),
        head_ranks=head_ranks,
        rope=length_rope(model),
        hooks=show_hidden(model, policy) if looks else None,
        rotations=rotations,
        centres=centres,
        projections=find_projections(model, policy) if policy.sees_projection else {},
    )
    return KVCache(config, policy, request, block, kernel_of(model), plan, link=link)


def check_codec(model: PreTrainedModel, policy: Policy) -> None:
    """Refuse a codec that cannot store a model's keys and values, or not there (UsageError)."""
    if policy.codec is not None:
        check_dims(policy, layer_shapes(model.config))
        for side in policy.codec.sides():
            side.check_device(str(model.device))


def read_plan(plan: PlanDocument | dict | str | Path) -> PlanDocument:
    """Return a plan from a document, its data or its file (UsageError: it cannot be read)."""
    return read_as(plan, PlanDocument, "a plan", command="this")


def check_planned_layers(plan: PlanDocument, policy: Policy) -> None:
    """Refuse a plan whose layers a policy cannot follow, as it relates them (UsageError)."""
    tokens = [plan.layers.tokens[i] for i in plan.free_layers]
    split, relation, uneven = policy.head_split, policy.score.layer_tokens, len(set(tokens)) > 1
    uniform = plan.layers.allocator == Uniform.name  # which may leave layers a token apart
    gives, why = f"the plan gives them {min(tokens)} to {max(tokens)}", None
    if split is not None and split.across_layers and uneven and not uniform:
        why = f"the layers of policy `{policy}` compete for one budget, and {gives}"
    elif relation == "same" and uneven:
        why = f"policy `{policy.score.name}` keeps the same tokens in all layers, and {gives}"
    elif relation == "nested" and tokens != sorted(tokens, reverse=True):
        why = (
            f"policy `{policy.score.name}` keeps in each layer part of what the layer above keeps, "
            "and the plan gives a layer more than the one above"
        )
    if why is not None:
        raise UsageError(why, hint="plan with --allocator uniform, or give a budget")


def kernel_of(model: PreTrainedModel) -> str:
    """The attention implementation that the model was loaded with, which kvtool uses as well."""
    previous = attachment(model)
    return previous.implementation if previous else model.config._attn_implementation


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
