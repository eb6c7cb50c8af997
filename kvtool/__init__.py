"""KV-cache compression for language models; names load on first use, so importing costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtool.version import VERSION

if TYPE_CHECKING:
    from kvtool.cache.entry.build import attach, build_cache, compressed
    from kvtool.cache.files.load import load_cache
    from kvtool.cache.files.save import save_cache
    from kvtool.cache.hooks.attach import detach
    from kvtool.calls.check_policy import check_policy
    from kvtool.calls.compress import compress
    from kvtool.calls.evaluate import evaluate
    from kvtool.calls.export import export
    from kvtool.calls.generate import generate
    from kvtool.calls.load_results import load_results
    from kvtool.calls.plan import plan
    from kvtool.calls.profile import profile
    from kvtool.errors import KvtoolError, PolicyError, UsageError
    from kvtool.policies.grammar import parse_policy

__version__ = VERSION

_HOMES = {
    "parse_policy": "kvtool.policies.grammar",
    "build_cache": "kvtool.cache.entry.build",
    "attach": "kvtool.cache.entry.build",
    "compressed": "kvtool.cache.entry.build",
    "detach": "kvtool.cache.hooks.attach",
    "save_cache": "kvtool.cache.files.save",
    "load_cache": "kvtool.cache.files.load",
    "check_policy": "kvtool.calls.check_policy",
    "compress": "kvtool.calls.compress",
    "generate": "kvtool.calls.generate",
    "load_results": "kvtool.calls.load_results",
    "plan": "kvtool.calls.plan",
    "evaluate": "kvtool.calls.evaluate",
    "export": "kvtool.calls.export",
    "profile": "kvtool.calls.profile",
    "KvtoolError": "kvtool.errors",
    "UsageError": "kvtool.errors",
    "PolicyError": "kvtool.errors",
}

_WITHOUT_TRANSFORMERS = ("kvtool.errors", "kvtool.policies.grammar")

__all__ = [
    "KvtoolError",
    "PolicyError",
    "UsageError",
    "attach",
    "build_cache",
    "check_policy",
    "compress",
    "compressed",
    "detach",
    "evaluate",
    "export",
    "generate",
    "load_cache",
    "load_results",
    "parse_policy",
    "plan",
    "profile",
    "save_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtool' has no attribute {name!r}")
    if _HOMES[name] not in _WITHOUT_TRANSFORMERS:
        import_module("kvtool.transformers_versions").check_transformers()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
