"""Caches that a call goes on from: their policy and budget, and whether they fit the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.calls.chosen import given_policy
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.sizes import Budget, parse_prefill

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.policies.policy import Policy


def resumed_policy(
    settings: GenerationSettings, cache: str | KVCache
) -> tuple[Policy, Budget | None]:
    """Return policy and budget of a cache; settings that say something else are refused."""
    size = None if settings.budget is None else Budget.parse(settings.budget)
    from kvtool.cache.files.format import read_metadata
    from kvtool.policies.grammar import read_spelling

    path = settings.cache_path
    made = {} if path is None else read_metadata(path)
    given = given_policy(settings)  # first, since it may import what the file names
    if isinstance(cache, str):
        name, policy = f"cache `{cache}`", read_spelling(made["policy"])
        budget = Budget.parse(made["budget"]) if made["budget"] else None
    else:
        name, policy, budget = "the cache", cache.policy, cache.budget
    if given is not None and given != policy:
        typed = settings.policy if settings.allocator is None else given
        raise UsageError(f"{name} was made with policy `{policy}`, not `{typed}`")
    if size is not None and size != budget:
        raise UsageError(f"{name} was made with budget {budget}, not {size}")
    return policy, budget


def open_cache(settings: GenerationSettings, request: Request, loaded: Loaded) -> KVCache:
    """Return the cache to go on from, or an empty one."""
    from kvtool.cache.files.load import load_cache

    cache = settings.cache
    if cache is None:
        return request.new_cache(loaded.model, record=settings.show is not None)
    if settings.cache_path is not None:
        cache = load_cache(settings.cache_path, loaded.model)
    assert not isinstance(cache, str), "which has a path"
    if settings.cache_path is None:
        _check_fits(cache, loaded)
    if settings.show is not None:
        cache.record()
    if settings.prefill is not None:
        cache.read_in_blocks(parse_prefill(request.prefill))
    return cache


def _check_fits(cache: KVCache, loaded: Loaded) -> None:
    """Refuse a cache of another model, and one of several texts.

    Raises:
        UsageError: a model that differs in configuration, weights or dtype; more than one row.
    """
    from kvtool.identity import config_hash
    from kvtool.weights_hash import weights_hash

    made_for, model = cache.link.model(), loaded.model
    if made_for is not model:
        other = config_hash(cache.config) != config_hash(model.config.get_text_config(decoder=True))
        if not other and made_for is not None:
            other = weights_hash(made_for) != weights_hash(model)
        if other:
            raise UsageError(f"the cache is that of another model, not of `{loaded.name}`")
    if cache.first_layer.batch_size > 1:
        raise UsageError(
            f"the cache holds {cache.first_layer.batch_size} texts, and one is gone on from",
            hint="model.generate(**inputs, past_key_values=cache) takes batches",
        )
