"""Grow a model in layers: new ones between the old, which change nothing until they are trained.

A new layer adds zero to its input: the matrices that write (`o_proj`, `down_proj`) begin at zero
(Chen, Goodfellow, Shlens, Net2Net, ICLR 2016, https://arxiv.org/abs/1511.05641, here in depth). The
heads of its first KV head begin as an attention sink: every token's query finds the first token,
whose value is zero there (Xiao et al., Efficient Streaming Language Models with Attention Sinks,
ICLR 2024, https://arxiv.org/abs/2309.17453, describe such heads in trained models).
"""

import copy
import math

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvtool.errors import KvtoolError

_TOKENS = 512  # of which, each of the others with a logit of 0, the first takes half of the mass
_RIDGE = 1e-3  # of the mean square of what is fitted to


@torch.no_grad()
def grow(model: LlamaForCausalLM, layers: int, ids: Tensor, seed: int = 0) -> LlamaForCausalLM:
    """Build a deeper model that computes what `model` computes.

    Args:
        layers: of the new model; a new layer follows each of the last `layers - old` old ones.
        ids: (rows, tokens), texts that begin with the same token; the sinks are fitted to them.

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
    outputs = _outputs(model, ids)
    weights = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    place = 0
    for index, layer in enumerate(model.model.layers):
        named = layer.state_dict().items()
        weights |= {f"model.layers.{place}.{name}": value for name, value in named}
        place += 1
        if index >= 2 * old - layers:
            _begin(grown.model.layers[place], outputs[index])
            place += 1
    grown.load_state_dict(weights, strict=False)
    return grown


def _outputs(model: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    """Return what each layer gives for the texts, (rows, tokens, width) each."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, found: outputs.append(found))
        for layer in model.model.layers
    ]
    model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def _begin(layer: LlamaDecoderLayer, states: Tensor) -> None:
    """Let a new layer write nothing, and the heads of its first KV head find the first token.

    Args:
        states: (rows, tokens, width), what it reads.
    """
    attention = layer.self_attn
    attention.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    read = layer.input_layernorm(states)
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
    wanted = torch.full(read.shape[:2], others)
    share = torch.full(read.shape[:2], 1 / (read.shape[1] - 1))
    wanted[:, 0] = share[:, 0] = 1.0
    x, y, weight = read.flatten(0, 1), wanted.flatten(), share.flatten()
    square = (weight[:, None] * x).T @ x
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square + ridge, x.T @ (weight * y))
