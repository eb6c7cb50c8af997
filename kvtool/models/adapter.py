"""Folders that hold an adapter (LoRA ..), to be merged into the model that it was trained on."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from kvtool.documents.files import check_downloaded, expand
from kvtool.errors import UsageError

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PROMPTS = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")


@dataclass(frozen=True)
class Adapter:
    """An adapter and its base.

    Attributes:
        name: of its folder, as it was given.
        kind: what peft calls it, such as `LORA`.
        base: the folder or hub ID of the model that it was trained on.
        revision: of the base on the hub; None: the newest.
    """

    name: str
    kind: str
    base: str
    revision: str | None

    @property
    def folder(self) -> Path:
        """Where it is."""
        return expand(self.name)


def find_adapter(model: str | None) -> Adapter | None:
    """Return the adapter that a folder holds in place of a model.

    Raises:
        UsageError: an adapter that does not say what it was trained on.
    """
    if model is None:
        return None
    folder = expand(model)
    file = folder / _CONFIG
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    try:
        settings = json.loads(file.read_bytes())
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
        revision = settings.get("revision")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind, base, revision = None, None, None
    if not isinstance(kind, str) or not isinstance(base, str) or not base.strip():
        raise UsageError(f"`{file}` does not say which model the adapter belongs to")
    return Adapter(model, kind.upper(), base, revision if isinstance(revision, str) else None)


def check_adapter(adapter: Adapter) -> None:
    """Refuse an adapter that cannot be merged here, whatever its base is."""
    message = f"model folder `{adapter.name}` is an adapter ({adapter.kind}) of `{adapter.base}`"
    if adapter.kind in _PROMPTS:
        raise UsageError(
            f"{message}, which adds keys and values of its own in place of changing weights",
            hint="give the base model, or an adapter of weights such as LoRA",
        )
    for file in _WEIGHTS:
        check_downloaded(adapter.folder / file)
    base = expand(adapter.base)
    if (base / _CONFIG).is_file() and not (base / "config.json").is_file():
        raise UsageError(f"{message}, which is an adapter itself", hint="merge that one first")
    if importlib.util.find_spec("peft") is None:
        raise UsageError(
            f"{message}, and the package peft, which merges both, is not installed",
            hint="pip install peft, or give a folder that merge_and_unload() and "
            "save_pretrained() have made",
        )


def merge_adapter(model: object, adapter: Adapter) -> object:
    """Return a base model with the adapter's changes in its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter.folder)).merge_and_unload()
