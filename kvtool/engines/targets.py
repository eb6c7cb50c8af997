"""The engines that load an exported cache, and what each is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtool.documents.files import write_text, write_with
from kvtool.documents.settings import Dtype, flag, settings_of
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.engines.virtual_prompt import VirtualPrompt

Engine = Literal["vllm", "llamacpp", "mlx"]
SUFFIXES = {"vllm": ".safetensors", "llamacpp": ".bin", "mlx": ".safetensors"}
_TAKES = {
    "vllm": ("dtype",),
    "llamacpp": ("engine_version", "type", "flash_attention", "streams"),
    "mlx": ("dtype", "engine_version"),
}
_BESIDE = ("slots", "policy", "model", "text", "system", "question_before", "question_after")


@dataclass(frozen=True, kw_only=True)
class Target:
    """An engine that will load a file, and how it runs; None is the newest, and f16."""

    to: Engine = flag("--to", "The engine that will load it.", default="vllm")
    dtype: Dtype = flag(
        "--dtype",
        "Of the exported keys and values; auto: that of the cache.  [default: auto]",
        default="auto",
    )
    engine_version: str | None = flag(
        "--engine-version=VERSION",
        "Of llama.cpp's states (2, 3, 4), or the release of mlx-lm.  [default: the newest]",
    )
    type: Literal["f16", "f32", "q8_0", "q4_0"] | None = flag(
        "--type", "Of llama.cpp's keys and values.  [default: f16]"
    )
    flash_attention: bool = flag(
        "--flash-attention/--no-flash-attention",
        "Whether llama.cpp runs with flash attention.  [default: it does]",
        default=True,
    )
    streams: int = flag(
        "--streams=N", "Slots of a llama.cpp that does not unify them.", min=1, default=1
    )

    def check_target(self, path: Path) -> None:
        """Refuse what the engine does not take, and a file that it would not look at.

        Raises:
            UsageError: with what would work.
        """
        takes, suffix = _TAKES[self.to], SUFFIXES[self.to]
        for each in settings_of(Target):
            if each.name not in ("to", *takes) and getattr(self, each.name) != each.default:
                known = ", ".join(f"--{name.replace('_', '-')}" for name in takes)
                reason = f"{each.flag.names.split('/')[-1]} is not for --to {self.to}"
                raise UsageError(reason, hint=f"{self.to} takes {known}")
        if path.suffix != suffix:
            usage = f"kvtool export book.kv.safetensors --to {self.to} --save book{suffix}"
            raise UsageError(f"--save must end in {suffix}, got `{path.name}`", hint=usage)
        if self.to == "llamacpp":
            self._layout()
        elif self.to == "mlx":
            from kvtool.engines.mlx import has_offsets

            has_offsets(self.engine_version)

    def write(self, prompt: VirtualPrompt, path: Path) -> tuple[str, int]:
        """Write the engine's file, whole or not at all; return the type and bytes that it holds.

        Beside a state of llama.cpp comes a JSON file that `kvtool.engines.llamacpp.ask` reads.
        """
        if self.to != "llamacpp":
            from kvtool.cache.tensor_files.tensor_file import write_tensors
            from kvtool.engines.mlx import prompt_cache

            own = self.to == "mlx" and prompt_cache(prompt, self.engine_version)
            write_tensors(path, *(own or (prompt.tensors, prompt.metadata)))
            return prompt.metadata["dtype"], prompt.nbytes
        from kvtool.engines.llamacpp.format import describe_path

        layout = self._layout()
        state = b"".join(layout.state(prompt.layers(), prompt.ids, prompt.family))
        known = {name: prompt.metadata[name] for name in _BESIDE if name in prompt.metadata}
        write_text(describe_path(path), json.dumps(known, indent=1) + "\n")
        write_with(path, lambda part: part.write_bytes(state))
        return layout.type, len(state)

    def _layout(self) -> Any:
        """Return how llama.cpp lays a state out, which may be refused."""
        from kvtool.engines.llamacpp.format import VERSIONS, Layout

        version, transposed = self.engine_version or VERSIONS[-1], not self.flash_attention
        return Layout(version, self.type or "f16", transposed, self.streams)
