"""The settings of `kvtool serve`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from kvtool.calls.base_settings import DecodingSettings, at_least, check_cache_file
from kvtool.calls.settings import CachedSettings
from kvtool.documents.files import expand
from kvtool.documents.settings import flag
from kvtool.errors import UsageError
from kvtool.sizes import DEFAULT_NEW_TOKENS, parse_memory

API_KEY = "KVTOOL_API_KEY"
"""The environment's variable that holds a key, so that no list of processes shows it."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(DecodingSettings, CachedSettings):
    """A server's address, its limits, and the texts that conversations start from."""

    device_memory: str | None = None  # has no flag: --memory bounds the caches

    host: str = flag(
        "--host=ADDRESS", "Listen here; 0.0.0.0 is every network.", default="127.0.0.1"
    )
    port: int = flag(
        "--port=N", "Listen here; 0: any that is free.", min=0, max=65535, default=8000
    )
    cache: list[str] = flag(
        "--cache=CACHE.safetensors",
        "Start conversations from this saved cache; several have names of their own.",
        default=[],
    )
    memory: str | None = flag(
        "--memory=BYTES",
        "Hold caches of this size: texts of --cache, running requests, conversations "
        "(8GiB).  [default: half of what is free, up to 64 running]",
    )
    rows: int | None = flag(
        "--rows=N",
        "Run at most N requests at a time; -p auto chooses what holds N of the longest.  "
        "[default: as many as fit; auto: 1]",
        min=1,
    )
    allow_policies: str | None = flag(
        "--allow-policies=POLICIES",
        "Policies that a request may choose, such as h2o,snapkv.  [default: none]",
    )
    api_key: str | None = flag("--api-key=KEY", f"Answer requests with this key only.  [{API_KEY}]")
    max_new_tokens: str | int | None = flag(
        "--max-new-tokens -n=N",
        f"Tokens of an answer where the request does not say.  [default: {DEFAULT_NEW_TOKENS}]",
        key="generation.max_new_tokens",
    )
    longest_prompt: str | None = flag(
        "--longest-prompt=N", "Refuse longer prompts.  [default: what the model was trained for]"
    )
    prefill_chunk: int = flag(
        "--prefill-chunk=N",
        "Read this number of tokens of a prompt between two steps of the other answers.",
        min=1,
        default=512,
    )
    longest_answer: str | None = flag(
        "--longest-answer=N",
        "Refuse requests for more tokens.  [default: what the model was trained for]",
    )
    allow_host: list[str] = flag(
        "--allow-host=NAME",
        "Answer to this name, too; a server without a key on this machine answers to localhost.",
        default=[],
    )
    drain: int = flag(
        "--drain=SECONDS",
        "Let running answers end for so long once the server is told to stop.",
        min=0,
        default=30,
    )

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer at most, where a request does not say."""
        return at_least(1, self.max_new_tokens or DEFAULT_NEW_TOKENS, "--max-new-tokens")

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of all caches."""
        return None if self.memory is None else parse_memory(self.memory)

    @property
    def longest(self) -> int | None:
        """The tokens of a prompt at most, where that is said."""
        given = self.longest_prompt
        return None if given is None else at_least(1, given, "--longest-prompt")

    @property
    def longest_answer_tokens(self) -> int | None:
        """The tokens that a request may ask for, where that is said."""
        given = self.longest_answer
        return None if given is None else at_least(1, given, "--longest-answer")

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that the server answers to; None: to any."""
        if self.key is not None or not self.is_loopback:
            return None
        own = ("localhost", "127.0.0.1", "[::1]", self.host, *self.allow_host)
        return frozenset(each.lower() for each in own)

    @property
    def key(self) -> str | None:
        """The key that requests must give."""
        return os.environ.get(API_KEY) if self.api_key is None else self.api_key

    @property
    def cache_paths(self) -> list[Path]:
        """The files of the texts that conversations start from."""
        return [expand(path) for path in self.cache]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check(self) -> None:
        _ = self.new_tokens, self.longest, self.longest_answer_tokens, self.memory_bytes
        self.check_no_share()
        if self.chooses and self.cache:
            raise UsageError("--cache goes on by the policy it was made with", hint="no -p auto")
        if self.tensor_parallel:
            raise UsageError("--tensor-parallel is not for serve, which is one process")
        key = self.key
        if key is not None and not (key and key.isascii() and not any(map(str.isspace, key))):
            raise UsageError(f"a key (--api-key, {API_KEY}) is ASCII without spaces, not empty")
        for path in self.cache_paths:
            check_cache_file(path)
