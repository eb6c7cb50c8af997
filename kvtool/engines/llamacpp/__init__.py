"""Ask `llama-server` about an exported cache, and refuse answers that did not come from it.

llama.cpp reads a prompt whose cache it does not have as text, and answers without an error. So
each call here checks what the server says.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.engines.llamacpp.format import describe_path, read_ids
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.chat import continued_ids

_SECONDS = 600.0  # that an answer may take


def restore(url: str, file: str | Path, *, slot: int = 0, api_key: str = "") -> list[int]:
    """Load an exported cache into a slot of a server, and return the ids that stand for it.

    Args:
        url: of the server, such as `http://127.0.0.1:8080`.
        file: that `kvtool export --to llamacpp` has written, into the server's `--slot-save-path`.

    Raises:
        KvtoolError: the server has not restored it whole, with its reason.
    """
    path = Path(os.path.expanduser(file))
    try:
        ids, size = read_ids(path), path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror or error}") from None
    found = _post(url, f"/slots/{slot}?action=restore", {"filename": path.name}, api_key)
    tokens, read = found.get("n_restored"), found.get("n_read")
    if tokens != len(ids) or read not in (None, size):
        raise KvtoolError(
            f"the server restored {tokens} tokens ({read} bytes) of `{path.name}`, which has "
            f"{len(ids)} ({size} bytes)",
            hint="put the file into its --slot-save-path",
        )
    return ids


def ask(
    url: str,
    file: str | Path,
    question: str | Sequence[int],
    *,
    max_new_tokens: int = 256,
    tokenizer: Any = None,
    slot: int = 0,
    api_key: str = "",
    **options: Any,
) -> str:
    """Restore an exported cache and ask about it, as `kvtool generate --cache` does.

    If the cached text is in an open chat message, the question goes on with it and closes it.

    Args:
        url, file, slot, api_key: as for `restore`.
        question: its text, or its token ids without those that begin a text.
        tokenizer: of the model, for a text; None: the server makes the tokens. The two differ where
            a tokenizer puts a space before whatever it encodes (Llama 2, Mistral).
        options: of the server's `/completion`; without `temperature`, the likeliest tokens.

    Raises:
        KvtoolError: the server refused, or has not taken all slots from the cache.
    """
    if not question:
        raise UsageError("no question: an answer needs at least one token behind the cache")
    beside = describe_path(Path(os.path.expanduser(file)))
    try:
        around = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`{beside}`, which the export writes, is needed: {error}") from None
    ids, asked = restore(url, file, slot=slot, api_key=api_key), list[Any](question)
    if isinstance(question, str):
        text = f"{around.get('question_before', '')}{question}{around.get('question_after', '')}"
        asked = [text] if tokenizer is None else continued_ids(tokenizer, text)
    request = {"temperature": 0.0, **options, "n_predict": max_new_tokens}
    request |= {"prompt": [*ids, *asked], "id_slot": slot, "cache_prompt": True}
    answer = _post(url, "/completion", request, api_key)
    taken = answer.get("timings", {}).get("cache_n", 0)
    if taken < len(ids):
        raise KvtoolError(
            f"the server took {taken} of {len(ids)} tokens from the cache and read the others as "
            "text, so its answer is not about the cached text",
            hint="no other client may use the slot at the same time",
        )
    return answer["content"]


def _post(url: str, path: str, data: dict[str, Any], key: str) -> Any:
    """Send JSON and return the answer's, or the server's reason as a `KvtoolError`."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(url.rstrip("/") + path, json.dumps(data).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise KvtoolError(f"llama-server refused {path}: {said}") from None
    except (OSError, ValueError) as error:
        raise KvtoolError(f"no answer of llama-server at {url}: {error}") from None
