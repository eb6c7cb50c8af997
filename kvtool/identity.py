"""Identify models by a hash of what their configuration computes, and nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_VOLATILE = {
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation"),
    *("_commit_hash", "_experts_implementation", "_name_or_path", "name_or_path"),
    *("architectures", "auto_map", "dtype", "torch_dtype", "quantization_config"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    "transformers_version",
}


def config_hash(config: Any) -> str:
    """Return the sha256 of a transformers configuration.

    Where the model was loaded from, in which dtype or bits of its weights, with which attention
    kernel and by which version of transformers does not change it.
    """
    values = config if isinstance(config, dict) else config.to_dict()
    text = json.dumps(_stable(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    return value
