"""The oracle whose tokens are at their rank among the kept ones, as in StreamingLLM.

A key is taken back to how it was before it was turned, and turned anew by its rank, pair by pair
with complex numbers; so is the query.
"""

import torch

from .oracle import Oracle


class Ranked(Oracle):
    """The oracle of `positions=cache`."""

    interleaved = False
    still = ()  # layers without positions

    def dots(self, layer, query, own, keys, visible, slots):
        rank = {position: place for place, position in enumerate(slots)}
        placed = self.place(layer, keys[visible], visible, [rank[p] for p in visible])
        return placed @ self.place(layer, query[None], [own], [rank[own]])[0]

    def place(self, layer, vectors, positions, ranks):
        """Keys or queries (tokens, head_dim) turned by `positions` -> turned by `ranks`."""
        if layer in self.still:
            return vectors.float()
        frequencies = self.frequencies(layer)
        pairs = len(frequencies)
        if self.interleaved:
            left, right = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        else:
            left, right = slice(0, pairs), slice(pairs, 2 * pairs)
        out = vectors.double().clone()
        plain = torch.complex(out[:, left], out[:, right]) * unit(positions, frequencies).conj()
        turned = plain * unit(ranks, frequencies)
        out[:, left], out[:, right] = turned.real, turned.imag
        return out.float()

    def frequencies(self, layer):
        """Radians a position of every pair."""
        config = self.model.config
        rope = config.rope_parameters
        if "rope_theta" not in rope:  # layers of different kinds turn differently
            rope = rope[config.layer_types[layer]]
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        size = int(size * rope.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        return rope["rope_theta"] ** -steps


class Interleaved(Ranked):
    """The same for families whose pairs are neighbours."""

    interleaved = True


class AlternatelyStill(Interleaved):
    """The same where every other layer has no positions (Cohere 2)."""

    still = (1, 3)


class LastStill(Ranked):
    """Half-split pairs, and a last layer without positions (SmolLM 3)."""

    still = (3,)


def unit(places, frequencies):
    """Complex numbers of length 1 at the angles place x frequency."""
    angles = torch.tensor(places).double()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)
