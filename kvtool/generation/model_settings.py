"""The settings of a model's generation_config.json: which are followed, and which are refused.

kvtool draws tokens in a loop of its own inside transformers' `generate`, which makes the logits
processors and stopping criteria. So most settings are followed by transformers itself. Those that
ask for another loop, a second cache or another prompt would be lost; they are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from kvtool.cache.hooks.generate_calls import PLAIN_CACHES
from kvtool.errors import KvtoolError, UsageError

_WHERE = "the model's generation settings (generation_config.json)"

OURS = (  # an option of kvtool replaces them
    *("max_length", "max_new_tokens", "do_sample", "temperature", "use_cache"),
    *("cache_config", "max_cache_len"),
)
IDLE = (  # change no token: speed, what is returned beside the tokens, beams
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "bos_token_id", "decoder_start_token_id"),
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),  # of beams
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
    *("assistant_ensemble_weight", "prefill_chunk_size", "compile_config", "disable_compile"),
    *("continuous_batching_config", "transformers_version"),
)
REFUSED: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value != 1,
    "num_beam_groups": lambda value: value != 1,
    "num_return_sequences": lambda value: value != 1,
    "penalty_alpha": lambda value: value != 0,
    "guidance_scale": lambda value: value != 1,
    "token_healing": bool,
    "dola_layers": lambda value: True,
    "constraints": bool,
    "force_words_ids": bool,
    "cache_implementation": lambda value: value not in PLAIN_CACHES,
}
"""Whether a value that is given would change the tokens or how they are stored."""

_SAMPLING = ("top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_ENDING = ("stop_strings", "max_time")
_RESET = tuple(name for name in (*OURS, *IDLE, "cache_implementation") if name != "bos_token_id")


def drawing_settings(
    model: PreTrainedModel, max_new_tokens: int, temperature: float, min_new_tokens: int
) -> GenerationConfig:
    """Return the model's own settings but for what is said here; temperature 0 samples nothing.

    Raises:
        UsageError: the model's own settings ask for what the decoding loop cannot do.
    """
    _check_refused(model.generation_config)
    settings = copy.deepcopy(model.generation_config)
    for name in _RESET:
        setattr(settings, name, None)
    settings.max_new_tokens = max_new_tokens
    least = settings.min_new_tokens or 0
    if type(least) is not int:
        raise UsageError(f"{_WHERE} have min_new_tokens: {least}, which is no number of tokens")
    settings.min_new_tokens = min(max(min_new_tokens, least), max_new_tokens) or None
    settings.num_beams = settings.num_return_sequences = 1
    settings.do_sample = temperature > 0
    if settings.do_sample:
        settings.temperature = temperature
    else:
        settings.temperature = None
        for name in _SAMPLING:
            setattr(settings, name, None)
    vocabulary = _vocabulary(model)
    settings.eos_token_id = _tokens("eos_token_id", settings.eos_token_id, vocabulary)
    pad = settings.pad_token_id
    if not _is_token(pad, vocabulary):  # -1 in some files; rows that have ended are then filled
        settings.pad_token_id = settings.eos_token_id[0] if settings.eos_token_id else None
    return settings


@dataclass(frozen=True)
class Prepared:
    """What transformers has made of settings for a text."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    settings: GenerationConfig


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    settings: GenerationConfig,
    stops: Sequence[StoppingCriteria] = (),
) -> Prepared:
    """Let transformers' own generate, which runs nothing here, make processors and criteria.

    Args:
        input_ids: (batch, n) the text so far.
        settings: of `drawing_settings`.
        stops: further criteria.

    Raises:
        UsageError: settings that nothing can be made of, with what transformers says of them.
    """
    taken: list[Prepared] = []

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **unused):
        taken.append(Prepared(logits_processor, stopping_criteria, generation_config))
        return input_ids

    lent = copy.copy(model)  # what is not set would be taken from the model's settings again
    texts, settings = settings.stop_strings, copy.deepcopy(settings)
    settings.stop_strings = None
    vars(lent).update(generation_config=settings)
    with _refused_in_one_line():
        if texts is not None:  # transformers gives a loop of others no tokenizer
            stops = [StopStringCriteria(tokenizer, texts), *stops]
        type(model).generate(
            lent,
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList(stops),
            custom_generate=take,
        )
    return taken[0]


def check_drawing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationConfig
) -> None:
    """Refuse settings that cannot be used, before a prompt is read."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    made = prepare(model, tokenizer, ids, settings)
    with _refused_in_one_line():
        made.processors(
            ids, torch.zeros(1, _vocabulary(model), dtype=torch.float32, device=model.device)
        )
        made.criteria(ids, None)


@contextmanager
def _refused_in_one_line() -> Iterator[None]:
    """Turn whatever transformers raises of settings into one line."""
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:  # any: each setting is checked elsewhere, or nowhere
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{_WHERE} cannot be used: {reason}") from error


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of all tokens that end a text, none where the model names none."""
    ends = model.generation_config.eos_token_id
    return _tokens("eos_token_id", ends, _vocabulary(model)) or []


def ends_early(model: PreTrainedModel) -> bool:
    """Return whether the model's settings end texts in other ways than by a token."""
    return any(getattr(model.generation_config, name, None) is not None for name in _ENDING)


def _check_refused(given: GenerationConfig) -> None:
    for name, changes in REFUSED.items():
        value = getattr(given, name, None)
        if value is not None and changes(value):
            raise UsageError(
                f"{_WHERE} have {name}: {value}, which decoding under a budget cannot follow",
                hint=f"set model.generation_config.{name} to None, or take it out of the file",
            )


def _tokens(name: str, value: Any, vocabulary: int) -> list[int] | None:
    """Read one token id or several; those beyond the vocabulary never come up."""
    if isinstance(value, Tensor):
        value = value.tolist()
    values = value if isinstance(value, (list, tuple)) else [value]
    if value is None or not values:
        return None
    if not all(type(each) is int for each in values):
        raise UsageError(
            f"{_WHERE} have {name}: {value}, and a token is a whole number",
            hint="a token id or a list of them",
        )
    found = [each for each in values if 0 <= each < vocabulary]
    return found or None


def _is_token(value: Any, vocabulary: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary


def _vocabulary(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size
