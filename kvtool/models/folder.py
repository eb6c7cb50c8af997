"""Find a model before anything heavy is imported, and explain in one line why it does not load.

A folder is checked on the disk, and the hub is asked once whether it has the model. Messages and
errors of libraries become one line with a hint.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from kvtool.documents.files import check_downloaded, check_name, check_unicode, expand
from kvtool.errors import KvtoolError, UsageError, is_out_of_memory, quote
from kvtool.model_shape import quantised_by
from kvtool.models import reference
from kvtool.models.adapter import check_adapter, find_adapter
from kvtool.models.config_sizes import check_sizes
from kvtool.models.gguf import GgufFile, check_gguf, find_gguf
from kvtool.models.smollm2 import find_smollm2, is_smollm2, unpacked

REFERENCE = "reference"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "tekken.json"),
)


def is_bundled(model: str) -> bool:
    """Return whether a name is that of a bundled model; a folder of that name goes first."""
    return model in reference.CHECKPOINTS and not Path(model).exists()


def base_of(model: str | None, revision: str | None = None) -> tuple[str | None, str | None]:
    """Return the model, and its revision, that says how an adapter's folder is run; or the same."""
    adapter = None if model is None or is_bundled(model) else find_adapter(model)
    return (model, revision) if adapter is None else (adapter.base, adapter.revision)


def tokenizer_folder(model: str | None) -> str | None:
    """Return an adapter's own folder if it holds a tokenizer; None: its base has the tokenizer."""
    if base_of(model)[0] == model:
        return None
    place = find_source(model).place
    return place if any((Path(place) / file).is_file() for file in _TOKENIZERS) else None


class Source(NamedTuple):
    """Where a model is loaded from.

    Attributes:
        name: to report.
        place: a folder or a hub ID.
        gguf: the file in that place which holds the whole model, where one does.
    """

    name: str
    place: str
    gguf: GgufFile | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, so that no hub is asked."""
        return Path(self.place).is_dir()


def find_source(model: str | None) -> Source:
    """Find where a model is; None is the bundled reference model.

    Raises:
        UsageError: a name that no path can have, no such GGUF file, or several in a folder; no
            package that holds it.
    """
    if model is None:
        return Source(REFERENCE, str(reference.path()))
    if is_bundled(model):
        return Source(model, str(reference.path(model)))
    gguf = find_smollm2() if is_smollm2(model) else find_gguf(model)
    if gguf is not None:
        return Source(model, gguf.place, gguf)
    if is_smollm2(model):
        return Source(model, str(unpacked()))
    return Source(model, str(expand(model)) if model.startswith("~") else model)


def check_folder(model: str | None, *, config_only: bool = False) -> None:
    """Refuse, without importing torch, a model folder that lacks what loading needs.

    Raises:
        UsageError: the folder, its config.json, its weights or its tokenizer is missing.
    """
    name, place, gguf = find_source(model)
    if not place.strip():
        raise UsageError("the model name is empty", hint="give a folder or a hub ID")
    folder = Path(place)
    check_name(folder, "--model")
    check_unicode(name, "the name of model")
    if gguf is not None:
        check_gguf(name, gguf)
        return
    if not folder.is_dir():
        if folder.is_file():
            raise UsageError(f"model `{name}` is a file", hint="give the folder that holds it")
        if place.startswith(("/", "./", "../")) or place.endswith("/") or place.count("/") > 1:
            raise UsageError(f"model folder `{name}` does not exist")
        return
    config = folder / "config.json"
    adapter = find_adapter(place)
    if adapter is not None:
        check_adapter(adapter)
        _check_tokenizer(folder)
        check_folder(adapter.base, config_only=config_only)
        return
    if not config.is_file():
        raise UsageError(f"model folder `{name}` has no config.json")
    check_downloaded(config)
    try:
        data = json.loads(config.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it holds no mapping")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{config}` is not valid JSON: {error}") from None
    check_sizes(name, data)
    if config_only:
        return
    _check_weights(name, folder)
    if not _check_tokenizer(folder):
        raise UsageError(f"model folder `{name}` has no tokenizer (no tokenizer.json)")


def _check_tokenizer(folder: Path) -> bool:
    """Refuse a tokenizer that is not downloaded; return whether there is one."""
    files = [folder / file for file in _TOKENIZERS if (folder / file).is_file()]
    for file in files[:1] if folder / "tokenizer.json" in files else files:
        check_downloaded(file)  # transformers reads no other file for what tokenizer.json says
    return bool(files)


def _check_weights(name: str, folder: Path) -> None:
    """Refuse a folder without weights; all indexes are read, since transformers chooses one."""
    whole = [folder / file for file in _WEIGHTS if (folder / file).is_file()]
    for file in whole[:1]:
        check_downloaded(file)
    indexes = [folder / file for file in _INDEXES if (folder / file).is_file()]
    if not whole and not indexes:
        raise UsageError(f"model folder `{name}` has no weights (no {_WEIGHTS[0]})")
    for index in indexes:
        shards = _read_shards(index)
        for shard in shards:
            _check_inside(index, shard)
            if not whole:
                check_downloaded(folder / shard)
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing and not whole:
            raise UsageError(
                f"model folder `{name}` lacks {len(missing)} of {len(shards)} weight files "
                f"(first: {missing[0]})"
            )
        whole.append(index)  # a further one is of weights in another format


def _read_shards(index: Path) -> list[str]:
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({PurePath(shard).as_posix() for shard in shards})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"`{index}` is not an index of weight files") from None


def _check_inside(index: Path, shard: str) -> None:
    """Refuse a weight file that an index places outside of its folder."""
    folder = index.parent.resolve()
    places = [folder]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    try:
        named = PurePath(shard)
        inside = not named.is_absolute() and ".." not in named.parts
        inside = inside and any((folder / named).resolve().is_relative_to(p) for p in places)
    except (OSError, ValueError, RuntimeError):  # no name of a file, links in a circle
        inside = False
    if not inside:
        raise UsageError(
            f"`{index}` names {quote(shard)}, which is outside the model's folder",
            hint="put the weight files into that folder",
        )


UNQUANTISED = "give the checkpoint that it was made from"
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)\. ")
_QUANTISED = {"gptq": "GPTQ", "awq": "AWQ"}  # others are called as they are named in config.json


@contextlib.contextmanager
def library_output_on_stderr(progress: bool) -> Iterator[None]:
    """Keep what libraries print while loading off stdout, and their advice quiet."""
    from huggingface_hub.utils import enable_progress_bars
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    before = [(logging, logging.get_verbosity()) for logging in (hub, transformers)]
    bars = transformers.is_progress_bar_enabled()
    for logging, _ in before:
        logging.set_verbosity_error()
    transformers.disable_progress_bar()
    if progress:
        enable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        (transformers.enable_progress_bar if bars else transformers.disable_progress_bar)()
        for logging, verbosity in before:
            logging.set_verbosity(verbosity)


@contextlib.contextmanager
def in_one_line(part: str, name: str, where: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever a library raises about a foreign checkpoint into one line with a hint."""
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: the checkpoint decides what runs
        raise _translate(part, name, error, where) from error


@contextlib.contextmanager
def named_if_quantised(name: str, config: Any) -> Iterator[None]:
    """Say of weights that cannot be loaded that they are quantised, and how."""
    method = quantised_by(config)
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: each format is a package of its own
        if method is None or is_out_of_memory(error):
            raise
        raise KvtoolError(
            f"the weights of `{name}` are quantised with {_QUANTISED.get(method, method)}, and "
            f"cannot be loaded here: {_one_line(error)}",
            hint=UNQUANTISED,
        ) from error


def check_tensors(name: str, info: Mapping[str, Any]) -> None:
    """Refuse weights of other shapes, and weights that lack some."""
    if info["mismatched_keys"]:
        tensor, stored, expected = sorted(info["mismatched_keys"])[0]
        raise KvtoolError(
            f"the weights of `{name}` do not fit its config.json: {tensor} is "
            f"{tuple(stored)}, must be {tuple(expected)}"
        )
    missing = sorted(info["missing_keys"])
    if missing and any(key.endswith(".qweight") for key in info["unexpected_keys"]):
        raise KvtoolError(
            f"the weights of `{name}` are quantised (GPTQ or AWQ), and its config.json has no "
            "quantization_config that says how",
            hint=UNQUANTISED,
        )
    if missing:
        raise KvtoolError(
            f"the weights of `{name}` lack {len(missing)} tensors of its architecture "
            f"(first: {missing[0]})"
        )


def _translate(part: str, name: str, error: Exception, where: Mapping[str, Any]) -> KvtoolError:
    if is_out_of_memory(error):
        return KvtoolError(f"not enough memory for model `{name}`", hint="try --dtype bfloat16")
    text = " ".join(str(cause) for cause in _chain(error))
    if not where.get("trust_remote_code") and "trust_remote_code" in text:
        return UsageError(
            f"model `{name}` brings its own code, which is not run unasked",
            hint="read that code, then pass --trust-remote-code",
        )
    if "does not recognize this architecture" in text or any(
        sign in text for sign in ("Unrecognized model", "GGUF model with architecture")
    ):
        return KvtoolError(
            f"the architecture of model `{name}` is not supported: {_one_line(error)}"
        )
    if not find_source(name).is_here:
        return translate_hub(name, text, error)
    return KvtoolError(f"cannot read the {part} of model `{name}`: {_one_line(error)}")


def translate_hub(name: str, text: str, error: Exception) -> KvtoolError:
    """Say what is wrong with a model of the hub, from the `text` of an error."""
    if "gated repo" in text or "403 " in text:
        return KvtoolError(f"access to model `{name}` is restricted", hint="log in: hf auth login")
    if any(sign in text for sign in ("couldn't connect", "Connection", "offline", "resolve")):
        return unreachable(name)
    if any(sign in text for sign in ("valid model identifier", "Repo id must", "404 ", "401 ")):
        return UsageError(
            f"no folder `{name}` here, and no model of that name on the hub",
            hint="a private model needs a login: hf auth login",
        )
    return KvtoolError(f"cannot load model `{name}`: {_one_line(error)}")


class Unreachable(KvtoolError):
    """The hub, which may have what is asked for, cannot be asked."""


def unreachable(name: str) -> Unreachable:
    """Say of a model that the hub, which may have it, cannot be asked."""
    return Unreachable(
        f"no folder `{name}` here, and the hub cannot be reached for a model of that name",
        hint="give a folder, or check the network (HF_HUB_OFFLINE, HF_ENDPOINT)",
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _one_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"nothing is known of {text}"
    sentence = _SENTENCE_END.split(text)[0].rstrip(".")
    return sentence if len(sentence) <= 200 else sentence[:197] + "..."


def check_hub(model: str | None, revision: str | None = None) -> None:
    """Refuse a model that is neither here nor on the hub, or whose hub cannot be reached.

    What the hub's cache holds already is not asked for. There is one request, without retries; a
    hub that is there but unwell is left to those of transformers.
    """
    if model is None or find_source(model).is_here:
        return
    _, place, gguf = find_source(model)
    file = "config.json" if gguf is None else gguf.file
    error = _ask_hub(place, file, unreachable(model), revision=revision)
    if error is not None:
        raise translate_hub(model, str(error), error) from error


def check_hub_data(name: str) -> None:
    """Refuse a dataset of a hub that cannot be reached, unless the hub's cache has some of it.

    There is one request, without retries; what the hub answers is left to who reads the data.
    """
    away = Unreachable(f"the hub cannot be reached for data `{name}`")
    _ask_hub(name, "README.md", away, repo_type="dataset")


def _ask_hub(place: str, file: str, away: Unreachable, **where: Any) -> Exception | None:
    """Ask for a file unless the hub's cache has it; return what the hub refuses."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(place, file, **where), str):
            get_hf_file_metadata(hf_hub_url(place, file, **where))
    except (errors.EntryNotFoundError, errors.RevisionNotFoundError):
        return None
    except (errors.RepositoryNotFoundError, ValueError) as error:  # or no name of a model
        return error
    except errors.HfHubHTTPError:
        return None
    except Exception as error:  # any: of the network, by whichever client the hub's package has
        raise away from error
    return None
