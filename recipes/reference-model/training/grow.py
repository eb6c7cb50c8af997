"""Grow a model in layers: new ones between the old, which change nothing until they are trained.

A new layer adds zero to its input: the matrices that write (`o_proj`, `down_proj`) begin at zero
(Chen, Goodfellow, Shlens, Net2Net, ICLR 2016, https://arxiv.org/abs/1511.05641, here in depth).
"""

import copy

import torch
from transformers import LlamaForCausalLM

from kvtool.errors import KvtoolError


@torch.no_grad()
def grow(model: LlamaForCausalLM, layers: int, seed: int = 0) -> LlamaForCausalLM:
    """Build a deeper model that computes what `model` computes.

    Args:
        layers: of the new model, whose new layers are at the places of `new_places`.

    Raises:
        KvtoolError: fewer layers than the model has, or more than twice as many.
    """
    old = len(model.model.layers)
    if not old <= layers <= 2 * old:
        raise KvtoolError(f"{old} layers grow to {old} to {2 * old}, not to {layers}")
    torch.manual_seed(seed)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    grown = LlamaForCausalLM(config).to(model.dtype)
    new = new_places(old, layers)
    kept = iter(place for place in range(layers) if place not in new)
    weights = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    for layer in model.model.layers:
        place = next(kept)
        named = layer.state_dict().items()
        weights |= {f"model.layers.{place}.{name}": value for name, value in named}
    grown.load_state_dict(weights, strict=False)
    for place in new:
        grown.model.layers[place].self_attn.o_proj.weight.zero_()
        grown.model.layers[place].mlp.down_proj.weight.zero_()
    return grown


def new_places(old: int, layers: int) -> list[int]:
    """Return the places of new layers: one follows each of the last old ones.

    >>> new_places(4, 8), new_places(4, 6)
    ([1, 3, 5, 7], [3, 5])
    """
    alone = 2 * old - layers
    return list(range(alone + 1, layers, 2))
