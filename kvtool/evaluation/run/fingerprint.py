"""Fingerprints: short hashes, beside a stored answer, of what the answer depends on.

A resumed run takes a stored answer only if all of them are what they would be now.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtool.identity import config_hash
from kvtool.models.chat import template_of
from kvtool.package_data import package_hash
from kvtool.policies.source import source_hash
from kvtool.version import VERSION

if TYPE_CHECKING:
    from kvtool.models.load import Loaded
    from kvtool.policies.policy import Policy

Fingerprint = dict[str, str]

WAYS_OUT = "--overwrite answers anew, another --output keeps what is there"
_DIGITS = 16
_DIFFER = {  # parts of a fingerprint, and what it means that one differs
    "prompt": "is one to another prompt",
    "settings": "was given under other settings",
    "package": "was given by another kvtool: its version or its code has changed",
    "model": "is another model's",
    "policy": "was given by other code of the policy",
}


def digest(value: Any) -> str:
    """Hash JSON values; anything else counts by what it prints as."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def model_digest(loaded: Loaded) -> str:
    """Hash what of a model decides on its answers: all weights, configuration, tokenizer, dtype."""
    from kvtool.cache.entry.build import kernel_of
    from kvtool.weights_hash import weights_hash

    model = loaded.model
    runs = [str(model.dtype), model.device.type, kernel_of(model)]
    hashes = [config_hash(model.config), weights_hash(model), text_hash(loaded)]
    return digest([*runs, *hashes])


def code_digests(policy: Policy) -> Fingerprint:
    """Hash the code that answers: that of the policy from outside the package, and the package."""
    return {"policy": digest(source_hash(policy)), "package": digest([VERSION, package_hash()])}


def fingerprint(shared: Fingerprint, content: str) -> Fingerprint:
    """Return the fingerprint of a record: what its task shares, and the hash of its sample."""
    return {"prompt": digest(content), **shared}


def difference(found: Mapping[str, str] | None, now: Mapping[str, str]) -> str | None:
    """Say how a stored answer differs from the one that would be given now, None if it does not.

    Args:
        found: its fingerprint, None where it has none.
    """
    if found is None:
        return "does not say what it depends on: it is an earlier kvtool's"
    changed = next((name for name in _DIFFER if found.get(name) != now[name]), None)
    return None if changed is None else _DIFFER[changed]


def text_hash(loaded: Loaded) -> str:
    """Hash what, beside the weights, decides on prompts and answers.

    That is the tokenizer with its chat template, and the model's own settings of generation, such
    as the tokens that end a text.
    """
    tokenizer = loaded.tokenizer
    generation = loaded.model.generation_config.to_diff_dict()
    generation = {name: generation[name] for name in generation if name != "transformers_version"}
    template = template_of(tokenizer)
    parts = [_tokenizer_parts(tokenizer), tokenizer.special_tokens_map, template, generation]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tokenizer_parts(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    parts = json.loads(backend.to_str())
    return {name: parts[name] for name in parts if name not in ("truncation", "padding")}
