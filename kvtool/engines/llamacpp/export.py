"""Write an exported cache as llama.cpp loads it into a slot, and beside it what asks about it."""

from __future__ import annotations

import json
from pathlib import Path

from kvtool.documents.files import write_text, write_with
from kvtool.engines.llamacpp.format import (
    NEIGHBOURS,
    VERSIONS,
    Layout,
    describe_path,
    neighbours,
)
from kvtool.engines.virtual_prompt import VirtualPrompt
from kvtool.errors import UsageError

_WIDTH = 32  # of the blocks that are rounded


def make_layout(
    version: str | None = None,
    kind: str | None = None,
    flash_attention: bool = True,
    streams: int = 1,
) -> Layout:
    """Return how the llama.cpp that is asked for lays a state out.

    Args:
        version: of its states; None: the newest.
        kind: of keys and values; None: f16.

    Raises:
        UsageError: no such version, or a context that llama.cpp does not have.
    """
    version, kind = version or str(VERSIONS[-1]), kind or "f16"
    if version not in map(str, VERSIONS):
        raise UsageError(
            f"llama.cpp's states are of version {', '.join(map(str, VERSIONS))}, not {version}",
            hint="the log of a failed restore says which one a build takes",
        )
    layout = Layout(int(version), kind, not flash_attention, streams)
    if layout.quantised and layout.version < 4:
        raise UsageError(
            f"states before version 4 do not say how their {kind} codes were made",
            hint="--type f16, or --engine-version 4",
        )
    if layout.quantised and layout.transposed:
        raise UsageError(
            f"llama.cpp holds {kind} values under flash attention only",
            hint="--type f16, or leave out --no-flash-attention",
        )
    return layout


def state_of(prompt: VirtualPrompt, layout: Layout) -> list[bytes]:
    """Return the bytes of a state.

    Raises:
        UsageError: a model that llama.cpp does not hold so, with the reason.
    """
    family = prompt.config.model_type
    if prompt.interleaved:
        raise UsageError(f"the keys of this `{family}` are in pairs already, which is not tested")
    layers = prompt.layers()
    heads, _, width = layers[0][0].shape
    if layout.quantised and heads * width % _WIDTH:
        raise UsageError(
            f"{layout.type} rounds {_WIDTH} numbers at a time, and a slot holds {heads * width}",
            hint="--type f16",
        )
    if family in NEIGHBOURS:
        layers = [(neighbours(keys), values) for keys, values in layers]
    return [*layout.state(layers, prompt.ids)]


def save_state(prompt: VirtualPrompt, path: Path, layout: Layout) -> int:
    """Write a state, and a JSON file beside it that `ask` reads; return the bytes of the state.

    Raises:
        UsageError: a model that llama.cpp does not hold so.
        KvtoolError: the system refused.
    """
    parts = state_of(prompt, layout)
    names = ("slots", "tokens_seen", "policy", "model", "digest", "kvtool")
    asks = ("text", "system", "question_before", "question_after")
    known = {name: prompt.metadata[name] for name in names + asks if name in prompt.metadata}
    write_text(describe_path(path), json.dumps(known, indent=1) + "\n")

    def write(part: Path) -> None:
        with open(part, "wb") as file:
            file.writelines(parts)

    write_with(path, write)
    return sum(map(len, parts))
