"""The reference model's tokenizer: known words and digits, raw bytes for everything else."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvtool.models.reference.vocabulary import BOS, BYTES, LETTERS, SPECIAL, TOKENS, UNK

MAX_TOKENS = 8192
_PIECE = r" ?(?:[a-z]+|[A-Z]{2}):| ?[A-Za-z]+| ?[0-9]| ?[^A-Za-z0-9 ]| "


def _log_probability(token: str) -> float:
    """Prefer whole words to letters; byte tokens never compete, they are the fallback."""
    if token in SPECIAL:
        return 0.0
    if token in BYTES or token in LETTERS:
        return -20.0
    return -1.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the vocabulary; nothing is trained.

    Returns:
        A tokenizer with `decode(encode(text)) == text` for any text without special tokens.
    """
    scored = [(token, _log_probability(token)) for token in TOKENS]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=UNK, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files to `folder` under a class name every transformers knows."""
    build_tokenizer().save_pretrained(folder)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 knows no other name
    settings_file.write_text(json.dumps(settings, indent=2) + "\n")
