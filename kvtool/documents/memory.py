"""What a run will take of a device's memory, as a dry run tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, SerializerFunctionWrapHandler, model_serializer

from kvtool.documents.document import PER_HEAD, Section, Unit
from kvtool.sizes import bytes_in_words


class DeviceMemory(Section):
    """A device, and the weights that will lie there.

    Attributes:
        free_bytes: None where the system does not tell. Told in words alone: what a dry run prints
            as data is the same whenever it is asked.
        weights_bytes: of weights and buffers; None where they are quantised, and not known.
    """

    device: str
    free_bytes: Annotated[NonNegativeInt | None, Field(exclude=True)]
    weights_bytes: NonNegativeInt | None

    def holds(self, peak_bytes: int | None) -> bool | None:
        """Tell whether so many bytes fit, weights included; None where that is not known."""
        if peak_bytes is None or self.free_bytes is None:
            return None
        return peak_bytes <= self.free_bytes

    def there(self) -> str:
        """Say what there is, and what the weights take of it."""
        free = "an unknown size" if self.free_bytes is None else bytes_in_words(self.free_bytes)
        weights = "weights of unknown size"
        if self.weights_bytes is not None:
            weights = f"weights {bytes_in_words(self.weights_bytes)}"
        return f"{weights}; {free} free on {self.device}"


class CacheNeeds(Section):
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
            the prompt is read or answered, and what layers compute with; None without the weights.
        fits: whether the peak does; None where that is not known.
    """

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

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found = serialize(self)
        if self.reads is None:
            found.pop("reads", None)  # which the caller may have left out already
        return found

    def beside(self, others: Sequence[CacheNeeds], memory: DeviceMemory) -> CacheNeeds:
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


class RunMemory(CacheNeeds, DeviceMemory):
    """A device, and what one run takes of it."""

    @classmethod
    def of(cls, device: DeviceMemory, needs: CacheNeeds) -> RunMemory:
        """Put both together."""
        parts = (device, needs)
        return cls(
            **{name: getattr(part, name) for part in parts for name in type(part).model_fields}
        )

    def in_words(self) -> str:
        """Say what is needed and what there is."""
        return f"memory: {self.needed()}; {self.there()}"
