"""Read a model's configuration with as few imports as it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtool.models.folder import base_of, check_folder, find_source
from kvtool.plain_config import plain_config
from kvtool.transformers_versions import reads_plain_configs


def read_config(model: str | None = None, *, revision: str | None = None, **where: Any) -> Any:
    """Read what planning asks of a configuration: a folder's config.json itself where it is plain.

    `revision` and `where` are as for `load_config`. A hub ID is asked of the hub, and read by
    transformers.

    Returns:
        A `PlainConfig`, or a transformers configuration.

    Raises:
        UsageError, KvtoolError: as `kvtool.models.load.load`.
    """
    check_folder(model, config_only=True)
    model, revision = base_of(model, revision)
    source = find_source(model)
    file = Path(source.place) / "config.json"
    if source.gguf is None and file.is_file() and reads_plain_configs():
        plain = plain_config(json.loads(file.read_bytes()))
        if plain is not None:
            return plain
    from kvtool.models.load import load_config

    return load_config(model, revision=revision, **where)
