"""Attention sinks by construction: heads in which every token finds the first one.

Trained models of some size have such heads (Xiao et al., Efficient Streaming Language Models with
Attention Sinks, ICLR 2024, https://arxiv.org/abs/2309.17453); small ones that are trained briefly
have none. Here a direction of the query and of the key, in the rotary pair that turns least, is
fitted so that the first token gets a large logit and the others none, and the value of the first
token is made zero. Training moves on, so this is done again every few steps.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_TOKENS = 1024  # of which, each of the others with a logit of 0, the first takes half of the mass
_RIDGE = 1e-3  # of the mean square of what is fitted to


@torch.no_grad()
def place_sinks(model: LlamaForCausalLM, places: Sequence[int], ids: Tensor) -> None:
    """Make sinks of the query heads of the first KV head of some layers.

    Args:
        places: of the layers.
        ids: (rows, tokens), texts that begin with the same token; sinks are fitted to them.
    """
    for place, read in zip(places, _inputs(model, places, ids), strict=True):
        _place(model.model.layers[place], read)


def _inputs(model: LlamaForCausalLM, places: Sequence[int], ids: Tensor) -> list[Tensor]:
    """Return what the attention of layers reads of the texts, (rows, tokens, width) each."""
    inputs: list[Tensor] = []
    norms = [model.model.layers[place].input_layernorm for place in places]
    hooks = [
        norm.register_forward_hook(lambda _, __, found: inputs.append(found)) for norm in norms
    ]
    model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [each.float() for each in inputs]


def _place(layer: LlamaDecoderLayer, read: Tensor) -> None:
    attention = layer.self_attn
    gain = math.sqrt(math.log(_TOKENS) / attention.scaling)
    # the pair of rotary embeddings that turns least: the last of the first half, and of the second
    slow = attention.head_dim // 2 - 1
    queries = attention.q_proj.weight.view(-1, attention.head_dim, read.shape[-1])
    queries[: attention.num_key_value_groups, slow] = gain * _fit(read, others=1.0)
    attention.k_proj.weight[slow] = gain * _fit(read, others=0.0)
    first = functional.normalize(read[:, 0].mean(0), dim=0)
    values = attention.v_proj.weight[: attention.head_dim]
    values -= torch.outer(values @ first, first)


def _fit(read: Tensor, *, others: float) -> Tensor:
    """Return weights that map first tokens to 1 and all `others` to a number, by ridge regression.

    First tokens together count as much as all others.
    """
    wanted = torch.full(read.shape[:2], others, device=read.device)
    share = torch.full(read.shape[:2], 1 / (read.shape[1] - 1), device=read.device)
    wanted[:, 0] = share[:, 0] = 1.0
    x, y, weight = read.flatten(0, 1), wanted.flatten(), share.flatten()
    square = (weight[:, None] * x).T @ x
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square), device=read.device)
    return torch.linalg.solve(square + ridge, x.T @ (weight * y))
