"""The settings of `kvtool serve`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from kvtool.calls.settings import CachedSettings
from kvtool.documents.files import check_name, expand
from kvtool.documents.settings import Flag
from kvtool.errors import UsageError
from kvtool.sizes import DEFAULT_NEW_TOKENS, Budget, parse_count, parse_memory

API_KEY = "KVTOOL_API_KEY"
"""The environment's variable that holds a key, so that no list of processes shows it."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(CachedSettings):
    """A server's address, its limits, and the texts that conversations start from."""

    device_memory: str | None = None  # has no flag: --memory bounds the caches

    host: Annotated[
        str,
        Flag("--host", metavar="ADDRESS", help="Listen here; 0.0.0.0 is every network."),
    ] = "127.0.0.1"
    port: Annotated[
        int, Flag("--port", min=0, max=65535, metavar="N", help="Listen here; 0: any that is free.")
    ] = 8000
    cache: Annotated[
        list[str],
        Flag(
            "--cache",
            metavar="CACHE.safetensors",
            help="Start conversations from this saved cache; several have names of their own.",
        ),
    ] = field(default_factory=list)
    memory: Annotated[
        str | None,
        Flag(
            "--memory",
            metavar="BYTES",
            help="Hold caches of this size: texts of --cache, running requests, conversations "
            "(8GiB).  [default: half of what is free, up to 64 running]",
        ),
    ] = None
    allow_policies: Annotated[
        str | None,
        Flag(
            "--allow-policies",
            metavar="POLICIES",
            help="Policies that a request may choose, such as h2o,snapkv.  [default: none]",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Flag("--api-key", metavar="KEY", help=f"Answer requests with this key only.  [{API_KEY}]"),
    ] = None
    max_new_tokens: Annotated[
        str | int | None,
        Flag(
            "--max-new-tokens -n",
            metavar="N",
            help="Tokens of an answer where the request does not say.  "
            f"[default: {DEFAULT_NEW_TOKENS}]",
            key="generation.max_new_tokens",
        ),
    ] = None
    longest_prompt: Annotated[
        str | None,
        Flag(
            "--longest-prompt",
            metavar="N",
            help="Refuse longer prompts.  [default: what the model was trained for]",
        ),
    ] = None
    prefill_chunk: Annotated[
        int,
        Flag(
            "--prefill-chunk",
            min=1,
            metavar="N",
            help="Read so many tokens of a prompt between two steps of the other answers.",
        ),
    ] = 512
    longest_answer: Annotated[
        str | None,
        Flag(
            "--longest-answer",
            metavar="N",
            help="Refuse requests for more tokens.  [default: what the model was trained for]",
        ),
    ] = None
    allow_host: Annotated[
        list[str],
        Flag(
            "--allow-host",
            metavar="NAME",
            help="Answer to this name, too; without a key, a server on this machine answers to "
            "localhost alone.",
        ),
    ] = field(default_factory=list)
    drain: Annotated[
        int,
        Flag(
            "--drain",
            min=0,
            metavar="SECONDS",
            help="Let running answers end for so long once the server is told to stop.",
        ),
    ] = 30

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer at most, where a request does not say."""
        if self.max_new_tokens is None:
            return DEFAULT_NEW_TOKENS
        return parse_count(self.max_new_tokens)

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of all caches."""
        return None if self.memory is None else parse_memory(self.memory)

    @property
    def longest(self) -> int | None:
        """The tokens of a prompt at most, where that is said."""
        return None if self.longest_prompt is None else parse_count(self.longest_prompt)

    @property
    def longest_answer_tokens(self) -> int | None:
        """The tokens that a request may ask for, where that is said."""
        return None if self.longest_answer is None else parse_count(self.longest_answer)

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
        if self.new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if self.longest is not None and self.longest < 1:
            raise UsageError(f"--longest-prompt must be 1 or more, got {self.longest_prompt}")
        if self.longest_answer_tokens is not None and self.longest_answer_tokens < 1:
            raise UsageError(f"--longest-answer must be 1 or more, got {self.longest_answer}")
        if self.memory_bytes == 0:
            raise UsageError("--memory must hold something, got 0")
        if self.budget is not None and Budget.parse(self.budget).share is not None:
            raise UsageError(
                f"-b {self.budget} goes with one prompt; a server takes tokens or bytes"
            )
        if self.tensor_parallel:
            raise UsageError("--tensor-parallel is not for serve, which is one process")
        key = self.key
        if key is not None and not (key and key.isascii() and not any(map(str.isspace, key))):
            raise UsageError(
                f"an API key (--api-key, {API_KEY}) is ASCII without spaces, not empty"
            )
        for path in self.cache_paths:
            check_name(path, "--cache")
            if not path.is_file():
                raise UsageError(f"cache file `{path}` does not exist")
