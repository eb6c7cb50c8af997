"""Turn what libraries say and raise while a model is loaded into one line with a hint."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError, UsageError, is_out_of_memory
from kvtool.models.folder import is_bundled

UNQUANTISED = "give the checkpoint that it was made from"
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)\. ")
_QUANTISED = {"gptq": "GPTQ", "awq": "AWQ"}  # others are called as they are named in config.json


@contextlib.contextmanager
def library_output_on_stderr(progress: bool) -> Iterator[None]:
    """Keep what libraries print while loading off stdout, and their advice quiet.

    Args:
        progress: whether the hub may show how far a download is.
    """
    from huggingface_hub.utils import enable_progress_bars
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    before = [(logging, logging.get_verbosity()) for logging in (hub, transformers)]
    bars = transformers.is_progress_bar_enabled()
    for logging, _ in before:
        logging.set_verbosity_error()
    _show_bars(False)
    if progress:
        enable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _show_bars(bars)
        for logging, verbosity in before:
            logging.set_verbosity(verbosity)


def _show_bars(wanted: bool) -> None:
    from transformers.utils import logging

    (logging.enable_progress_bar if wanted else logging.disable_progress_bar)()


@contextlib.contextmanager
def in_one_line(part: str, name: str, where: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever a library raises about a foreign checkpoint into one line with a hint.

    Args:
        where: how the checkpoint was asked for, in transformers' words.
    """
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: the checkpoint decides what runs
        raise _translate(part, name, error, where) from error


@contextlib.contextmanager
def named_if_quantised(name: str, config: Any) -> Iterator[None]:
    """Say of weights that cannot be loaded that they are quantised, and how."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        yield
        return
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method") or "bitsandbytes")  # which early files do not name
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: each format is a package of its own
        if is_out_of_memory(error):
            raise
        raise KvtoolError(
            f"the weights of `{name}` are quantised with {_QUANTISED.get(method, method)}, and "
            f"cannot be loaded here: {_one_line(error)}",
            hint=UNQUANTISED,
        ) from error


def _translate(part: str, name: str, error: Exception, where: Mapping[str, Any]) -> KvtoolError:
    if is_out_of_memory(error):
        return KvtoolError(f"not enough memory for model `{name}`", hint="try --dtype bfloat16")
    text = " ".join(str(cause) for cause in _chain(error))
    if not where.get("trust_remote_code") and "trust_remote_code" in text:
        return UsageError(
            f"model `{name}` brings its own code, which is not run unasked",
            hint="read that code, then pass --trust-remote-code",
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return KvtoolError(
            f"the architecture of model `{name}` is not supported: {_one_line(error)}"
        )
    if not Path(name).is_dir() and not is_bundled(name):
        return translate_hub(name, text, error)
    return KvtoolError(f"cannot read the {part} of model `{name}`: {_one_line(error)}")


def translate_hub(name: str, text: str, error: Exception) -> KvtoolError:
    """Say what is wrong with a model of the hub, of which `text` tells."""
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
