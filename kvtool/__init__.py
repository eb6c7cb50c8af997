"""KV-cache compression for language models; names load on first use, so importing costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvtool.version import VERSION

__version__ = VERSION

_HOMES = {
    "parse_policy": "kvtool.policies.grammar",
    "build_cache": "kvtool.cache.entry.build",
    "attach": "kvtool.cache.entry.build",
    "compressed": "kvtool.calls.auto_policy",
    "detach": "kvtool.cache.hooks.attach",
    "save_cache": "kvtool.cache.files.save",
    "load_cache": "kvtool.cache.files.load",
    "check_policy": "kvtool.calls.check_policy",
    "compress": "kvtool.calls.compress",
    "generate": "kvtool.calls.generate",
    "load_results": "kvtool.calls.evaluate",
    "plan": "kvtool.calls.plan",
    "evaluate": "kvtool.calls.evaluate",
    "export": "kvtool.calls.export",
    "profile": "kvtool.calls.profile",
    "KvtoolError": "kvtool.errors",
    "UsageError": "kvtool.errors",
    "PolicyError": "kvtool.errors",
}

_WITHOUT_TRANSFORMERS = ("kvtool.errors", "kvtool.policies.grammar")

__all__ = sorted(_HOMES)  # their keywords are in __init__.pyi


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtool' has no attribute {name!r}")
    if _HOMES[name] not in _WITHOUT_TRANSFORMERS:
        import_module("kvtool.transformers_versions").check_transformers()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
