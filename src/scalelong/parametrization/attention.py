"""Attention layers: where they are, their head size and queries; trial runs of layers, to see what they depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.skips.example import tensors_in, uncompiled

HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")
HEAD_SIZES = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head")
QUERIES = ("to_q", "q_proj", "query", "wq", "q", "to_query", "query_proj", "linear_q", "q_linear", "q_lin", "q_b_proj")
FUSED = ("qkv", "to_qkv", "qkv_proj", "c_attn")
NORMS = ("norm_q", "q_norm", "query_norm", "norm_query", "q_rms_norm", "q_layernorm", "q_layer_norm", "query_layernorm")


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Name, module and head size of attention as torch, diffusers, transformers, timm and this package write it.

    Modules whose layers have other names are found by two of head size, number of heads and the name of their class.
    """
    known: dict[str, int] = {}
    others: dict[str, int] = {}
    for name, module in model.named_modules():
        heads, size, kind = _stored(module, HEADS), _stored(module, HEAD_SIZES), type(module).__name__.lower()
        named = "attention" in kind or "attn" in kind
        queries = next((layer for key in QUERIES if (layer := _layer(module, key))), None)
        fused = fused_layer(module)
        if isinstance(module, nn.MultiheadAttention):
            known[name] = module.head_dim
        elif queries is not None and (heads or size):  # transformers' Llama stores the head size only
            known[name] = queries.weight.shape[0] // heads if heads else size
        elif fused is not None and (heads or size):
            known[name] = size or fused.weight.shape[0] // (3 * heads)
        elif queries is not None and _single_head(module, queries):
            known[name] = queries.weight.shape[0]
        elif (size > 0) + (heads > 0) + named > 1:
            layers = (each.weight for each in module.modules() if isinstance(each, nn.Linear | nn.Conv2d))
            width = min((max(weight.shape[:2]) for weight in layers), default=0)  # of the output projection, or fused
            others[name] = size or width // heads
    for name, size in (known | others).items():
        inside = (path for path in known | others if path != name and path.startswith(f"{name}." if name else ""))
        if size and (name in known or not any(inside)):  # else it is a block, whose attention is inside
            yield name, model.get_submodule(name), size


def _stored(module: nn.Module, names: tuple[str, ...]) -> int:
    """The first attribute of these names that is a number, or 0."""
    return next((found for name in names if isinstance(found := vars(module).get(name), int)), 0)


def _single_head(module: nn.Module, queries: Any) -> bool:
    """Whether queries and keys are from a module that stores no number but its channels, as in LDM's autoencoder."""
    numbers = {value for value in vars(module).values() if type(value) is int}
    keys = [_layer(module, name.replace("query", "key").replace("q", "k")) for name in QUERIES]
    return any(keys) and numbers <= {*queries.weight.shape} and not hasattr(module, "config")


def _layer(module: nn.Module, name: str) -> Any:
    """The linear layer or convolution of this name, which may be of a class of the model's own, or None."""
    found = getattr(module, name, None)
    weight = found._parameters.get("weight") if isinstance(found, nn.Module) else None
    return found if weight is not None and weight.dim() > 1 else None


def fused_layer(attention: nn.Module) -> Any:
    """The layer that queries, keys and values leave together, or None."""
    return next((layer for name in FUSED if (layer := _layer(attention, name))), None)


def query_layers(attention: nn.Module) -> Iterator[str]:
    """The modules that queries leave last: a norm behind the projection, if there is one; of timm, `q_norm`."""
    for norms, layers in ((NORMS, QUERIES), (("norm_added_q", "q_rms_norm_t"), ("add_q_proj", "to_q_t"))):
        found = [name for name in norms if isinstance(getattr(attention, name, None), nn.Module)]
        found += [name for name in layers if _layer(attention, name)]
        yield from found[:1]


def query_weights(attention: nn.Module) -> list[Tensor]:
    """The parameters that queries are computed from, or their first third where keys and values share them."""
    for layer in filter(None, (_layer(attention, name) for name in QUERIES)):
        return list(layer.parameters())
    fused = fused_layer(attention)
    bias = getattr(attention, "q_bias", None)  # of BEiT and EVA
    return [each[: len(each) // 3] for each in fused.parameters()] + [bias] * isinstance(bias, nn.Parameter)


def uses_scale(attention: nn.Module) -> bool:
    """Whether fused attention with as many keys as queries reads its attribute `scale`, which is 1 / sqrt(d)."""
    layer, scale = fused_layer(attention), getattr(attention, "scale", "none")
    if layer is None or not isinstance(scale, float | None) or getattr(attention, "fused_attn", False):  # of timm
        return False
    heads, rows = _stored(attention, HEADS), layer.weight.shape[0]
    size = _stored(attention, HEAD_SIZES) or rows // (3 * heads)
    if (heads and 3 * heads * size != rows) or (scale and not math.isclose(scale, size**-0.5, rel_tol=1e-3)):
        return False
    usual = rows**-0.5
    changes = [lambda twin: setattr(twin, "scale", usual), lambda twin: setattr(twin, "scale", usual / 2)]
    outputs = _tried(attention, layer.weight, *changes)
    return len(outputs) < 2 or not torch.equal(outputs[0], outputs[1])


def normalizes_weight(layer: nn.Module) -> bool:
    """Whether the output of a layer does not depend on the size of its weight, as with EDM2's or standardized weights."""
    if type(layer).__module__.startswith("torch.nn."):
        return False
    outputs = _tried(layer, layer.get_parameter("weight"), lambda _: None, lambda twin: twin.weight.mul_(2))
    return len(outputs) == 2 and bool((outputs[0] - outputs[1]).abs().max() < 1e-3 * outputs[0].abs().max())


def transposed(layer: nn.Module) -> bool:
    """Whether a layer stores its weight as fan-in x fan-out, unlike torch's, as transformers' `Conv1D` does."""
    weight = layer._parameters.get("weight")
    own = isinstance(layer, nn.Linear) or type(layer).__module__.startswith("torch.nn.")
    if own or weight is None or weight.dim() != 2:
        return False
    return not _tried(layer, weight, lambda _: None) and bool(_tried(layer, weight.T, lambda _: None))


def _tried(module: nn.Module, weight: Tensor, *changes: Callable[[Any], object]) -> list[Tensor]:
    """Outputs of a copy of a module, with random weights, after each change to it; fewer if it needs other inputs."""
    outputs: list[Tensor] = []
    if any(buffer.is_meta for buffer in module.buffers()):  # parameters get random values, buffers mean something
        return outputs
    channels, spatial = weight.shape[1], weight.dim() - 2
    with torch.random.fork_rng(devices=[]), torch.no_grad(), uncompiled(), suppress(Exception):
        twin = copy.deepcopy(module)
        twin = (twin.to_empty(device="cpu") if weight.is_meta else twin.cpu()).float().eval()
        for parameter in twin.parameters():
            fan_in = parameter.numel() / len(parameter) if parameter.dim() else 1.0
            parameter.normal_(std=fan_in**-0.5)  # small enough that no softmax saturates
        x = torch.randn(*((1, channels, *[8] * spatial) if spatial else (1, 4, channels)), device="cpu")
        for change in changes:
            change(twin)
            tensors = tensors_in(twin.forward(x))  # without the hooks of a scaling
            outputs.append(next(each for each in tensors if each.is_floating_point()))  # not the indices of a router
    return outputs
