"""Read configuration, tokenizer and weights through transformers: of a folder, the hub or GGUF.

From a GGUF file transformers rebuilds configuration and tokenizer, and leaves out some of what the
file says. That is put right here, or the file is refused. So is the name of the rule that splits
text before its tokens are looked up: transformers takes GPT-2's for all that it lacks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
)

from kvtool.cache.hooks.families import check_supported
from kvtool.errors import KvtoolError
from kvtool.models.config_sizes import check_sizes
from kvtool.models.folder import Source, check_tensors, in_one_line
from kvtool.models.gguf import CHECKPOINT_HINT, GgufFile, GgufHeader, read_model_header
from kvtool.models.gguf_ends import list_ends
from kvtool.transformers_versions import gguf_splits

_NOT_OF_A_CONFIG = ("_model_name_or_path", "unk_token_id")


class Checkpoint:
    """The files of a model, of which the configuration is read at once.

    Attributes:
        source: where they are; a GGUF file of the hub is downloaded.
        where: transformers' arguments for which files are read, and how.

    Raises:
        KvtoolError: no configuration of a model that can be run with a compressed cache.
    """

    def __init__(self, source: Source, where: Mapping[str, Any]) -> None:
        self.name, self.where = source.name, where
        with in_one_line("configuration", self.name, where):
            if source.gguf is not None:
                gguf = bring_here(self.name, source.gguf, where.get("revision"))
                source = source._replace(gguf=gguf)
            self.source = source
            self.config = self._read_config()

    def _read_config(self) -> Any:
        if self.source.gguf is not None:
            config = load_gguf_config(self.name, self.source.gguf)
        else:
            data, _ = PreTrainedConfig.get_config_dict(self.source.place, **self.where)
            check_sizes(self.name, data)
            config = AutoConfig.from_pretrained(self.source.place, **self.where)
        remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if type(config) not in AutoModelForCausalLM._model_mapping and not remote:
            raise KvtoolError(
                f"model `{self.name}` ({config.model_type}) is not a causal language model"
            )
        check_supported(config)
        return config

    def tokenizer(self, own: str | None) -> Any:
        """Read the tokenizer."""
        with in_one_line("tokenizer", self.name, self.where):
            if own is None and self.source.gguf is not None:
                return load_gguf_tokenizer(self.name, self.source.gguf)
            return AutoTokenizer.from_pretrained(own or self.source.place, **self.where)

    def weights(self, progress: bool, **options: Any) -> Any:
        """Read the weights into a model."""
        if self.source.gguf is not None:
            gguf, config = self.source.gguf, self.config
            model, info = load_gguf_weights(gguf, progress, config=config, **options)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.source.place,
                config=self.config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **self.where,
                **options,
            )
        check_tensors(self.name, info)
        return model


# ---- GGUF files


def bring_here(name: str, gguf: GgufFile, revision: str | None) -> GgufFile:
    """Download a file of the hub unless it is here or in the hub's cache, and check it.

    Args:
        name: of the model.
        revision: branch, tag or commit; None: the newest.

    Raises:
        UsageError: it is no file that holds a model.
    """
    if gguf.here:
        return gguf
    path = Path(huggingface_hub.hf_hub_download(gguf.place, gguf.file, revision=revision))
    found = GgufFile(str(path.parent), path.name, here=True)
    read_model_header(name, found)
    return found


def load_gguf_config(name: str, gguf: GgufFile) -> Any:
    """Return the configuration, whose dtype is the one to unpack the weights into.

    Raises:
        KvtoolError: no model can have its sizes; what transformers would leave out changes answers.
    """
    header = read_model_header(name, gguf)
    check_splits(name, header)
    with _no_bars():
        data, _ = PreTrainedConfig.get_config_dict(gguf.place, gguf_file=gguf.file)
    check_sizes(name, data)
    known = {key: value for key, value in data.items() if key not in _NOT_OF_A_CONFIG}
    config = AutoConfig.for_model(**known)
    if header.scales_rotations and not _scales_rotations(config):
        raise KvtoolError(
            f"`{name}` scales its rotations (RoPE), which transformers does not read from GGUF "
            f"files of `{config.model_type}`",
            hint=CHECKPOINT_HINT,
        )
    config.dtype = getattr(torch, header.dtype)
    config._name_or_path = name
    config._commit_hash = _commit(gguf.path)
    return config


def _scales_rotations(config: Any) -> bool:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    each = rope.values() if all(isinstance(part, dict) for part in rope.values()) else [rope]
    return any(part.get("rope_type", "default") != "default" for part in each)


def _commit(path: Path) -> str | None:
    """Return the commit of a file in the hub's cache, `snapshots/COMMIT/FILE`."""
    parts = path.parts
    if "snapshots" not in parts[:-2]:
        return None
    return parts[parts.index("snapshots") + 1]


def load_gguf_tokenizer(name: str, gguf: GgufFile) -> Any:
    """Return the tokenizer, which splits text as the file says."""
    header = read_model_header(name, gguf)
    check_splits(name, header)
    with _no_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.place, gguf_file=gguf.file)
    repair_splits(tokenizer, header)
    return tokenizer


def load_gguf_weights(
    gguf: GgufFile, progress: bool, *, config: Any, dtype: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a model like one of an ordinary folder, whose answers end where llama.cpp ends them.

    Args:
        progress: show a bar on stderr.
        dtype: of torch, or `auto` for the configuration's.
        options: further ones of `from_pretrained`.

    Returns:
        The model, and what `from_pretrained` reports of the weights.
    """
    with contextlib.nullcontext() if progress else _no_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            gguf.place,
            gguf_file=gguf.file,
            config=config,
            dtype=config.dtype if dtype == "auto" else dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    _forget_packing(model)
    header = read_model_header(gguf.file, gguf)
    if ends := list_ends(header.settings, header.words):
        model.generation_config.eos_token_id = ends
    return model, info


def _forget_packing(model: Any) -> None:
    """Let a model whose weights are unpacked be saved, and counted in bytes, as any other."""
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if name in vars(holder):
            delattr(holder, name)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the bars that transformers shows for GGUF files whatever its settings are."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def fill_folder(name: str, gguf: GgufFile, folder: Path, dtype: str, progress: bool) -> None:
    """Write config.json, weights as safetensors and a tokenizer into a folder that is there.

    Args:
        name: of the model.
        dtype: of the weights, by name; `auto`: the file's own, `bfloat16` where it is packed.
        progress: show a bar on stderr.

    Raises:
        KvtoolError: the file cannot be read as it should.
    """
    found = Checkpoint(Source(name, gguf.place, gguf), {})
    tokenizer = found.tokenizer(None)
    model = found.weights(progress, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- how text is split


def _gpt2() -> Any:
    return ByteLevel(add_prefix_space=False)


def _digits_alone() -> Any:
    """Each digit is a piece of its own; what lies between is split by GPT-2's rule."""
    return Sequence([Digits(individual_digits=True), _gpt2()])


RULES: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits_alone,
    "starcoder": _digits_alone,
    "refact": _digits_alone,
    "codeshell": _digits_alone,
}
"""Rules that transformers lacks, by llama.cpp's names, and what each is as a pre-tokenizer."""


def check_splits(name: str, header: GgufHeader) -> None:
    """Refuse a file whose rule is not known; vocabularies with scores are split by none."""
    splits = gguf_splits()
    if header.text("tokenizer.ggml.model") != "gpt2":
        return
    rule = header.text("tokenizer.ggml.pre")
    if rule not in RULES and rule not in splits:
        told = f"splits text by the rule `{rule}`, which kvtool does not know"
        if rule is None:
            told = "does not say how text is split into tokens (tokenizer.ggml.pre)"
        raise KvtoolError(f"`{name}` {told}", hint=CHECKPOINT_HINT)


def repair_splits(tokenizer: Any, header: GgufHeader) -> None:
    """Give a tokenizer the rule of its file where transformers lacks it."""
    rule = header.text("tokenizer.ggml.pre")
    if header.text("tokenizer.ggml.model") == "gpt2" and rule in RULES:
        tokenizer.backend_tokenizer.pre_tokenizer = RULES[rule]()
