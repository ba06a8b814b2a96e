"""diffusers' UNets in the paper's sizes, and one way to call any model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from scalelong.backbones import UViT, UViTConfig, as_network
from scalelong.backbones.unet import ddpm_cifar10, iddpm_imagenet64, model_inputs, text_latent

TIME = torch.tensor([3.0, 640.0])
TINY = {"sample_size": 16, "block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("build", "parameters"),
    [(ddpm_cifar10, 35_746_307), (iddpm_imagenet64, 144_394_083), (text_latent, 260_919_012)],
)
def test_sizes_of_the_paper(build: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_cifar10_network_is_that_of_ddpm() -> None:
    """Settings that do not change the number of parameters."""
    with torch.device("meta"):
        config = ddpm_cifar10().config
    assert (config.flip_sin_to_cos, config.freq_shift, config.norm_eps, config.downsample_padding) == (
        False,
        1,
        1e-6,
        0,
    )


def test_network_of_an_unconditional_unet() -> None:
    model = ddpm_cifar10(**TINY).eval()
    x = randn(2, 3, 16, 16)
    output = as_network(model)(x, TIME)
    torch.testing.assert_close(output, model(x, TIME).sample)


def test_network_of_a_class_conditional_unet() -> None:
    model = iddpm_imagenet64(**TINY, num_class_embeds=7, attention_head_dim=8).eval()
    x, labels = randn(2, 3, 16, 16), torch.tensor([4, 6])
    output = as_network(model)(x, TIME, class_labels=labels, context=None)
    torch.testing.assert_close(output, model(x, TIME, class_labels=labels).sample)
    assert not torch.allclose(output, as_network(model)(x, TIME, class_labels=labels.flip(0)))
    with pytest.raises(ValueError, match=r"network\.context: a UNet2DModel has no such condition; leave context out"):
        as_network(model)(x, TIME, context=randn(2, 3, 12))


def test_network_of_a_text_conditional_unet() -> None:
    model = text_latent(**TINY, cross_attention_dim=12, attention_head_dim=2).eval()
    x, context = randn(2, 4, 16, 16), randn(2, 3, 12)
    output = as_network(model)(x, TIME, context=context)
    torch.testing.assert_close(output, model(x, TIME, encoder_hidden_states=context).sample)
    assert not torch.allclose(output, as_network(model)(x, TIME, context=context.flip(0)))


def test_a_uvit_is_called_as_it_is() -> None:
    model = UViT(UViTConfig(image_size=8, patch_size=2, dim=32, depth=2, heads=2, text_dim=6, text_tokens=3))
    assert as_network(model) is model
    x, context = randn(2, 3, 8, 8), randn(2, 3, 6)
    inputs = model_inputs(model, x, TIME, context=context, class_labels=None)
    assert torch.equal(model(**inputs), model(x, TIME, context=context))


class Plain(nn.Module):
    """A user's own network, called by our names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None = None) -> Tensor:
        return self.scale * x + time[:, None] + (0 if context is None else context)


class Subclass(UNet2DConditionModel):  # type: ignore[misc]
    """A subclass of a diffusers UNet; its forward is small and refuses to return an object."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True
    ) -> tuple[Tensor]:
        if return_dict:
            raise RuntimeError("asked for an object")
        return (self.scale * sample + timestep[:, None] + encoder_hidden_states,)


def ddp(model: nn.Module) -> nn.Module:
    """Without the initial broadcast: freeing a group while gloo's thread still releases tensors can deadlock."""
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


@contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        ddp,
        lambda model: torch.compile(ddp(model), backend="eager"),
    ],
    ids=["compiled", "ddp", "compiled ddp"],
)
def test_network_sees_through_wrappers(wrap: Callable[[nn.Module], Any]) -> None:
    x, context = randn(2, 4), randn(2, 4) + 1
    with one_process():
        for model in (Subclass(), Plain()):
            wrapped = wrap(model)
            torch.testing.assert_close(as_network(wrapped)(x, TIME, context=context), x + TIME[:, None] + context)
            assert set(model_inputs(wrapped, x, TIME, context=context)) <= set(
                inspect.signature(model.forward).parameters
            )
