"""What transformers does with the batch entries of a cache's layer, and what it must not do."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvtool.errors import KvtoolError


class BatchLayer(CacheLayerMixin):
    """A layer whose tensors follow the batch entries, and whose last tokens may be taken back."""

    is_compileable = False
    is_croppable = False

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries, by what is done to a tensor of theirs."""
        raise NotImplementedError

    def get_max_length(self) -> int:
        return -1

    def why_no_crop(self, tokens: int) -> str | None:
        """Say why the last tokens cannot be taken back; None: they can."""
        raise NotImplementedError

    def cut_off(self, tokens: int) -> None:
        """Take the last tokens back."""
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove == 0:
            return
        why = self.why_no_crop(abs(tokens_to_remove))
        if why is not None:
            raise KvtoolError(
                f"this cache cannot be cropped: {why}",
                hint="generate without an assistant model and without prompt lookup",
            )
        self.cut_off(abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reindex(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reindex(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reindex(lambda t: t[indices.to(t.device)])
