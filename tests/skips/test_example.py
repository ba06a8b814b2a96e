"""What a look at a model may be given, and that it changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import scalelong
from scalelong.skips.attach import skip_shapes
from tests.standins import GatedBranch, TutorialUNet, image, randn


@dataclass
class Batch:
    image: torch.Tensor


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes."""

    __getattr__ = dict.__getitem__


class TestNothingIsChanged:
    """One look at a model leaves the model, its modes and buffers, and all random states as they were."""

    def test_modes_buffers_hooks_and_random_states(self) -> None:
        model = TutorialUNet().train()
        model.down2.eval()
        modes, state = [m.training for m in model.modules()], copy.deepcopy(model.state_dict())
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        scalelong.find_skips(model, example=image())
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_a_model_that_draws_noise_and_counts_its_calls(self) -> None:
        class Noisy(TutorialUNet):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                random.random()
                return super().forward(x + torch.randn_like(x) * np.random.rand())

        model, states = Noisy(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
        scalelong.apply(model, "cs", example=image())
        assert model.calls == 0
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])

    @pytest.mark.parametrize("training", [True, False])
    def test_a_model_whose_eval_merges_weights(self, training: bool) -> None:
        class Merging(nn.Conv2d):
            """As U-DiT's: eval() adds the second kernel onto the first, every time it is called."""

            def __init__(self) -> None:
                super().__init__(16, 16, 1)
                self.second = nn.Parameter(torch.randn(16, 16, 1, 1) / 4)

            def train(self, mode: bool = True) -> Merging:
                if not mode:
                    self.weight.data += self.second.data
                self.training = mode
                return self

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + (F.conv2d(x, self.second) if self.training else 0)

        model = TutorialUNet()
        model.attention = Merging()
        model.train(training)
        before = copy.deepcopy(model.state_dict())
        scalelong.apply(model, "cs", kappa=0.7, example=image())
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        assert model.attention.training is training

    def test_attributes_assigned_by_a_forward_are_restored(self) -> None:
        class Caching(TutorialUNet):
            """A new tensor in place of a buffer, and a cache with the number that says how large it is."""

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))
                self.register_buffer("cache", torch.ones(4))
                self.cached = 4

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls = self.calls + 1
                if self.cached < x.shape[-1]:
                    self.cached, self.cache = x.shape[-1], torch.ones(x.shape[-1])
                return super().forward(x * self.cache[: x.shape[-1]])

        model = Caching()
        kept, expected = dict(model.named_buffers()), copy.deepcopy(model)(*image())
        for look in (
            lambda: scalelong.find_skips(model, example=image()),
            lambda: scalelong.apply(model, "cs", example=image(), kappa=1.0),
        ):
            look()
            assert all(buffer is kept[name] for name, buffer in model.named_buffers() if name in kept)
            assert (model.calls, model.cached) == (0, 4)
        assert torch.equal(model(*image()), expected)

    @pytest.mark.parametrize("inference", [False, True])
    def test_the_example_of_a_forward_that_works_in_place(self, inference: bool) -> None:
        class InPlace(TutorialUNet):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x.mul_(0.5))

        with torch.inference_mode(inference):
            (x,) = image()
            before = x.clone()
            scalelong.find_skips(InPlace(), x)
            model = InPlace()
            scalelong.apply(model, "cs", kappa=0.5, example=x)
            scalelong.verify(model, x)
            scalelong.fold(model, x)
            assert torch.equal(x, before)

    @pytest.mark.parametrize("kind", [Batch, Attributes])
    def test_an_example_of_its_own_class(self, kind: type[Any]) -> None:
        class InPlace(TutorialUNet):
            def forward(self, batch: Any) -> torch.Tensor:
                return super().forward(batch.image.mul_(0.5))

        batch, model = kind(image=image()[0]), InPlace()
        before = batch.image.clone()
        scalelong.apply(model, "cs", kappa=0.5, example=(batch,))
        assert scalelong.verify(model, batch).dtype == torch.float64
        assert torch.equal(batch.image, before)

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
    @pytest.mark.parametrize(
        "compute", [torch.nn.utils.weight_norm, partial(prune.l1_unstructured, name="weight", amount=0.3)]
    )
    def test_weights_computed_before_each_forward(self, compute: Callable[..., Any]) -> None:
        model = TutorialUNet()
        compute(model.up1[0])
        model(*image())
        scalelong.apply(model, "cs", kappa=0.5, example=image())
        assert len(scalelong.verify(model, example=image()).checks) == 3
        model(*image()).sum().backward()
        assert model.up1[0].bias.grad is not None

    def test_the_same_skips_are_found_every_time(self) -> None:
        model = TutorialUNet()
        assert scalelong.find_skips(model, example=image()) == scalelong.find_skips(model, example=image())

    def test_a_scaled_model_shows_the_same_skips(self) -> None:
        model = TutorialUNet()
        before = scalelong.find_skips(model, example=image())
        scalelong.apply(model, "universal", kappa=0.5, example=image())
        assert scalelong.find_skips(model, example=image()) == before


class TestBadInput:
    def test_the_models_own_error_is_shown_under_ours(self) -> None:
        model = TutorialUNet()
        with pytest.raises(
            ValueError, match=r"example: the forward of TutorialUNet fails on it \(RuntimeError"
        ) as caught:
            scalelong.apply(model, "cs", example=randn(2, 4, 8, 8))
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())

    def test_no_example_for_an_unknown_class(self) -> None:
        with pytest.raises(ValueError, match=r"no example input.*example=\(x, t\)"):
            scalelong.apply(TutorialUNet(), "cs")

    def test_an_example_of_the_wrong_type(self) -> None:
        with pytest.raises(TypeError, match=r"example: must be a tensor.*got int"):
            scalelong.apply(TutorialUNet(), "cs", example=3)

    def test_an_output_that_does_not_depend_on_the_example(self) -> None:
        class Deaf(TutorialUNet):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.zeros(2, 3)

        with pytest.raises(ValueError, match="does not depend on it"):
            scalelong.find_skips(Deaf(), example=image())

    def test_a_sequence_of_layers_would_run_the_gates_as_a_layer(self) -> None:
        with pytest.raises(TypeError, match="make it an attribute of a module"):
            scalelong.apply(nn.Sequential(TutorialUNet()), "cs", example=image())

    def test_a_call_on_another_path_than_the_examples_is_refused(self) -> None:
        class Careless(GatedBranch):
            """On bright images the wide layers get the hidden state twice as wide, and no skip."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.mean() > 1:
                    return self.wide[0](self.first(x))
                return super().forward(x)

        model = Careless()
        scalelong.apply(model, "cs", kappa=0.5, example=image())
        with pytest.raises(ValueError, match="received 8 channels, not the 16 that contain the skip"):
            model(image()[0] + 5)

    def test_a_branch_without_skips_is_left_alone(self) -> None:
        model = GatedBranch()
        bright = image()[0] + 5
        before = model(bright)
        scalelong.apply(model, "cs", kappa=0.5, example=image())
        assert torch.equal(model(bright), before)


@pytest.mark.parametrize(
    "example",
    [image()[0], image(), list(image()), {"x": image()[0]}, (image(), {}), ((), {"x": image()[0]})],
    ids=["tensor", "tuple", "list", "dict", "args and none", "none and kwargs"],
)
def test_an_example_may_be_given_in_several_ways(example) -> None:
    assert len(scalelong.apply(TutorialUNet(), "cs", example=example).skips) == 3


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="older torch compiles while we look")
def test_a_model_of_compiled_blocks_is_traced_in_eager_mode() -> None:
    plain = TutorialUNet().eval()
    model = copy.deepcopy(plain)
    for name in ("down1", "down2", "up1"):
        setattr(model, name, torch.compile(getattr(model, name), backend="aot_eager"))
    torch.testing.assert_close(model(*image()), plain(*image()), rtol=1e-5, atol=1e-6)  # compiled before it is scaled
    for each in (plain, model):
        assert len(scalelong.apply(each, "cs", kappa=0.5, example=image()).skips) == 3
    torch.testing.assert_close(model(*image()), plain(*image()), rtol=1e-5, atol=1e-6)


def test_scripted_parts_are_named_in_the_error() -> None:
    model = TutorialUNet()
    model.down1 = torch.jit.script(model.down1)
    with pytest.raises(ValueError, match="scripted parts, which cannot be traced: script it after scaling"):
        scalelong.apply(model, "cs", example=image())


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_what_is_scaled_in_inference_mode_can_be_trained(method: str) -> None:
    model = TutorialUNet()
    with torch.inference_mode():
        scalelong.apply(model, method, example=image())
        scalelong.apply(TutorialUNet(), method, example=image())  # made there, too: its buffers count no changes
        assert all(check.gradient_error is not None for check in scalelong.verify(model, example=image()).checks)
    model(*image()).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


class Resizing(nn.Module):
    """Takes its skips down to the resolution where it joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), []
        for layer in self.down:
            kept.append(layer(x).tanh())
            x = F.avg_pool2d(kept[-1], 2)
        x = self.mid(x)
        for layer in self.up:
            x = layer(torch.cat([x, F.interpolate(kept.pop(), x.shape[-2:])], dim=1)).tanh()
        return x


def test_the_shape_of_a_skip_is_that_at_its_join() -> None:
    model, example = Resizing(), (randn(1, 3, 16, 16),)
    skips = scalelong.find_skips(model, example=example)
    assert skip_shapes(model, skips, (example, {})) == [(1, 4, 4, 4), (1, 4, 4, 4)]
