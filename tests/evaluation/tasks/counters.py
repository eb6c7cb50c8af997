"""Two ways to count tokens: the bundled tokenizer, and words."""

from functools import lru_cache

from transformers import AutoTokenizer

from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.models.reference import path


@lru_cache(maxsize=1)
def bundled() -> TokenCounter:
    tokenizer = AutoTokenizer.from_pretrained(path())
    return TokenCounter(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.decode
    )


def _words(text: str) -> list[str]:
    return text.split()


WORDS = TokenCounter(_words, " ".join)
