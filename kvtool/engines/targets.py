"""The engines that load an exported cache, and what each is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtool.documents.settings import Dtype, flag, settings_of
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.engines.llamacpp.format import Layout
    from kvtool.engines.virtual_prompt import VirtualPrompt

Engine = Literal["vllm", "llamacpp", "mlx"]
StateType = Literal["f16", "f32", "q8_0", "q4_0"]
SUFFIXES = {"vllm": ".safetensors", "llamacpp": ".bin", "mlx": ".safetensors"}
_TAKES = {
    "vllm": ("dtype",),
    "llamacpp": ("engine_version", "type", "flash_attention", "streams"),
    "mlx": ("dtype", "engine_version"),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """An engine that will load a file, and how it runs.

    Attributes:
        dtype: of the exported keys and values; `auto`: that of the cache.
        engine_version: of llama.cpp's states, or the release of mlx-lm; None: the newest.
        type: of llama.cpp's keys and values; None: f16.
        streams: of llama.cpp's context.
    """

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
    type: StateType | None = flag("--type", "Of llama.cpp's keys and values.  [default: f16]")
    flash_attention: bool = flag(
        "--flash-attention/--no-flash-attention",
        "Whether llama.cpp runs with flash attention.  [default: it does]",
        default=True,
    )
    streams: int = flag(
        "--streams=N", "Slots of a llama.cpp that does not unify them.", min=1, default=1
    )

    def check_target(self, path: Path | None = None) -> None:
        """Refuse what the engine does not take, and a file that it would not look at.

        Raises:
            UsageError: with what would work.
        """
        takes, suffix = _TAKES[self.to], SUFFIXES[self.to]
        for each in settings_of(Target):
            if each.name not in ("to", *takes) and getattr(self, each.name) != each.default:
                known = ", ".join(f"--{name.replace('_', '-')}" for name in takes)
                raise UsageError(
                    f"{each.flag.names.split('/')[-1]} is not for --to {self.to}",
                    hint=f"{self.to} takes {known}",
                )
        if path is not None and path.suffix != suffix:
            usage = f"kvtool export book.kv.safetensors --to {self.to} --save book{suffix}"
            raise UsageError(f"--save must end in {suffix}, got `{path.name}`", hint=usage)
        if self.to == "llamacpp":
            self._layout()
        elif self.to == "mlx":
            from kvtool.engines.mlx import read_release

            read_release(self.engine_version)

    def write(self, prompt: VirtualPrompt, path: Path) -> tuple[str, int]:
        """Write the engine's file, whole or not at all; return the type and bytes that it holds.

        Raises:
            UsageError: the engine does not hold such a model so.
            KvtoolError: the system refused.
        """
        if self.to == "llamacpp":
            from kvtool.engines.llamacpp.export import save_state

            layout = self._layout()
            return layout.type, save_state(prompt, path, layout)
        if self.to == "mlx":
            from kvtool.engines.mlx import read_release, save_prompt_cache

            save_prompt_cache(prompt, path, read_release(self.engine_version))
        else:
            prompt.save(path)
        return prompt.metadata["dtype"], prompt.nbytes

    def _layout(self) -> Layout:
        from kvtool.engines.llamacpp.export import make_layout

        return make_layout(self.engine_version, self.type, self.flash_attention, self.streams)
