"""The memory that a run will take on a device, and the shape of the model that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from kvtool.documents.document import PER_HEAD, Section, SparseSection, TokenCount, Unit
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import (
    DTYPE_BYTES,
    FREE,
    SLIDING,
    LayerShape,
    kept_of_window,
    layer_kinds,
    layer_shapes,
    stored_dtype,
    stores_latents,
    trained_length,
    window_width,
)
from kvtool.sizes import MOST_BYTES, bytes_in_words


class DeviceMemory(Section):
    """A device, and the weights that will lie there.

    Attributes:
        free_bytes: None where the system does not say. Printed in words alone: the data that
            a dry run prints are the same at any time.
        weights_bytes: of weights and buffers; None where they are quantised, and their files are
            not here.
    """

    device: str
    free_bytes: Annotated[NonNegativeInt | None, Field(exclude=True)]
    weights_bytes: NonNegativeInt | None

    def holds(self, peak_bytes: int | None) -> bool | None:
        """Return whether a number of bytes fits, weights included; None where that is not known."""
        if peak_bytes is None or self.free_bytes is None:
            return None
        return peak_bytes <= self.free_bytes

    def known(self, what: str) -> tuple[int, int]:
        """Return what is free and what the weights take; `UsageError` where one is not known."""
        if self.free_bytes is None or self.weights_bytes is None:
            unknown = "free memory" if self.free_bytes is None else "size of the weights"
            raise UsageError(
                f"{what}: the {unknown} is not known", hint="--device-memory SIZE, or -b in bytes"
            )
        return self.free_bytes, self.weights_bytes

    def there(self) -> str:
        """Say what there is, and what the weights take of it."""
        free = "an unknown size" if self.free_bytes is None else bytes_in_words(self.free_bytes)
        weights = "weights of unknown size"
        if self.weights_bytes is not None:
            weights = f"weights {bytes_in_words(self.weights_bytes)}"
        return f"{weights}; {free} free on {self.device}"


@dataclass(frozen=True)
class UnknownMemory:
    """Why no memory of a run can be estimated, and what would help; null in a document."""

    reason: str
    hint: str | None = None


class CacheMemory(SparseSection):
    """What a prompt and its answer take, from the configuration alone; bytes of all layers.

    Attributes:
        prompt_tokens: of the longest prompt; earlier turns and a saved cache's text are part of it.
        new_tokens: that are generated at most.
        tokens: of the prompt that each layer stores; the mean where the prompt itself decides.
        reads: what a decoded token looks at, where the budget is that.
        kv_bytes: of the buffers of keys and values, or of their codes and scales, at the end.
        state_bytes: of positions, numbers beside slots, and a reader's tables, at the end.
        host_bytes: of evicted tokens in host memory, at most.
        full_bytes: of the keys and values of a full cache in the model's dtype.
        peak_bytes: an estimate of all that lives at a time on the device: weights, the cache while
            the prompt is read or answered, and what layers compute with. None without the weights.
        fits: whether the peak does; None where that is not known.
    """

    optional: ClassVar = ("reads",)

    prompt_tokens: NonNegativeInt
    new_tokens: NonNegativeInt
    tokens: Annotated[list[NonNegativeInt], PER_HEAD]
    reads: Annotated[list[NonNegativeInt] | None, Unit("pairs per layer and KV head")] = None
    kv_bytes: NonNegativeInt
    state_bytes: NonNegativeInt
    host_bytes: NonNegativeInt = 0
    full_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt | None
    fits: bool | None

    def beside(self, others: Sequence[CacheMemory], memory: DeviceMemory) -> CacheMemory:
        """Return the same with the caches of others there at its peak.

        Args:
            memory: of the device.
        """
        if self.peak_bytes is None:
            return self
        there = sum(other.kv_bytes + other.state_bytes for other in others)
        if memory.device == "cpu":
            there += sum(other.host_bytes for other in others)
        peak = self.peak_bytes + there
        return self.model_copy(update={"peak_bytes": peak, "fits": memory.holds(peak)})

    def needed(self) -> str:
        """Say what is needed, and whether it fits."""
        held = f"{bytes_in_words(self.kv_bytes + self.state_bytes)} for the cache"
        if self.peak_bytes is None:
            return f"{held}, and quantised weights"
        verdict = {True: "fits", False: "does not fit", None: "may fit"}[self.fits]
        peak = f"about {bytes_in_words(self.peak_bytes)} at the peak, weights included"
        return f"{verdict}, {peak}, {held}"


class RunMemory(CacheMemory, DeviceMemory):
    """A device, and what one run takes of it.

    Attributes:
        plan: lines that split up the memory of a device that was named. Printed in words alone.
    """

    plan: Annotated[list[str], Field(exclude=True)] = Field(default_factory=list)

    @classmethod
    def of(cls, device: DeviceMemory, cache: CacheMemory) -> RunMemory:
        """Put both together."""
        parts = (device, cache)
        return cls(
            **{name: getattr(part, name) for part in parts for name in type(part).model_fields}
        )

    def in_words(self) -> str:
        """Say what is needed and what there is."""
        return f"memory: {self.needed()}; {self.there()}"


class ModelShape(SparseSection):
    """What a model stores per token, and what distinguishes it from others.

    `kv_bytes_per_token` counts keys and values of all attention layers, those with a sliding window
    included; `layer_types` are transformers' names, such as `full_attention`. In latent attention
    (MLA) one head stores `head_dim` numbers, the first `latent_dim` of them as key; elsewhere
    `latent_dim` is left out, and `head_dim` is the size of a key.
    """

    optional: ClassVar = ("latent_dim",)

    id: str
    revision: str | None = None
    config_hash: str
    dtype: str | None = None
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    latent_dim: PositiveInt | None = None
    layer_types: list[str]
    sliding_window: TokenCount | None = None
    kv_bytes_per_token: Annotated[PositiveInt, Field(le=MOST_BYTES)]
    vocabulary: PositiveInt | None = None
    trained_length: PositiveInt | None = None

    @classmethod
    def of(
        cls, config: Any, *, name: str, revision: str | None = None, dtype: str | None = None
    ) -> ModelShape:
        """Describe the model of a configuration.

        Args:
            config: a transformers configuration.
            name: what the model is called.
            dtype: in which keys and values are stored; None or `auto`: the checkpoint's own.
        """
        text = config.get_text_config(decoder=True)
        stored = [layer for layer in layer_shapes(config, dtype) if layer is not None]
        first, latent = stored[0], stores_latents(config)
        return cls(
            id=name,
            revision=revision,
            config_hash=config_hash(config),
            dtype=stored_dtype(config, dtype),
            layers=len(layer_kinds(config)),
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.key_dim + first.value_dim if latent else first.key_dim,
            latent_dim=first.key_dim if latent else None,
            layer_types=layer_kinds(config),
            sliding_window=window_width(config),
            kv_bytes_per_token=sum(layer.bytes for layer in stored),
            vocabulary=text.vocab_size,
            trained_length=trained_length(config),
        )

    @property
    def key_dim(self) -> int:
        """Numbers of a key in one head."""
        return self.latent_dim or self.head_dim

    def layer_shapes(self, sizes: Sequence[int] | None = None) -> list[LayerShape | None]:
        """Return what each layer stores, None for those without attention.

        Args:
            sizes: bytes of a token in every layer; None shares `kv_bytes_per_token` out evenly.

        Raises:
            UsageError: fewer bytes than heads have numbers; windows of unknown width.
        """
        stores = [kind in FREE or kind in SLIDING for kind in self.layer_types]
        if sizes is None:
            each = self.kv_bytes_per_token // max(1, sum(stores))
            sizes = [each if stored else 0 for stored in stores]
        found: list[LayerShape | None] = []
        for kind, stored, size in zip(self.layer_types, stores, sizes, strict=True):
            per_head = size // self.kv_heads
            itemsize = DTYPE_BYTES.get(self.dtype or "", 0)
            itemsize = itemsize or (2 if per_head == 4 * self.head_dim else 4)
            if stored and per_head < itemsize:
                raise UsageError(
                    f"model `{self.id}` stores {self.kv_bytes_per_token} bytes a token, too few "
                    f"for {self.kv_heads} KV heads in {sum(stores)} layers"
                )
            dims = (self.key_dim, per_head // itemsize - self.key_dim)
            shape = LayerShape(self.kv_heads, self.heads, *dims, itemsize, self._kept(kind))
            found.append(shape if stored else None)
        return found

    def _kept(self, kind: str) -> int | None:
        """Return the tokens that a layer keeps of its window, None without one."""
        if kind not in SLIDING:
            return None
        if self.sliding_window is None:
            raise UsageError(f"model `{self.id}` slides over windows of unknown width")
        return kept_of_window(self.sliding_window)
