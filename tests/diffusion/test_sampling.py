"""What every sampler does with every process, whatever the network."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from scalelong.diffusion import (
    DDPM,
    EDM,
    PROCESSES,
    SAMPLERS,
    VPSDE,
    Objective,
    get_process,
    guided,
    resolve_sampling,
)
from scalelong.random import normal
from scalelong.runs.settings import SamplingSettings
from tests.diffusion.gaussian_oracle import SHAPE, BestNetwork, sampled

EVERY_PAIR = [(p, s) for p in PROCESSES for s in SAMPLERS if s != "euler_maruyama" or p in ("vp", "cosine")]


def crooked_network(x, time):
    """Not linear, and different at every pixel and time."""
    return (x * 1.3 + torch.arange(16.0).view(1, 4, 4) / 9).tanh() + 0.1 * (time.view(-1, 1, 1, 1) / 100).sin()


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_an_image_depends_on_its_index_alone(name, sampler):
    """Neither on the size of the batch, nor on its place in it, nor on the other images."""
    objective, shape = Objective(get_process(name)), (1, 4, 4)

    def draw(*index):
        start = (11, torch.tensor(index), shape)
        return sampled(objective, crooked_network, start, sampler=sampler, steps=6)

    together = draw(*range(8))
    apart = torch.cat([draw(0, 1, 2), draw(3, 4, 5, 6, 7)])
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(draw(7, 2), together[[7, 2]], rtol=1e-6, atol=1e-6)
    assert (together[:, None] - together[None]).abs().amax((2, 3, 4)).fill_diagonal_(1).min() > 1e-2


@pytest.mark.parametrize("sampler", ["ddpm", "dpm++2m"])
def test_another_seed_is_another_image(sampler):
    one, other = (
        sampled(Objective(VPSDE()), crooked_network, (seed, torch.arange(2), (1, 4, 4)), sampler=sampler, steps=5)
        for seed in (0, 1)
    )
    assert (one - other).abs().amax((1, 2, 3)).min() > 1e-2


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_starting_noise_as_a_tensor_or_by_seed(name, sampler):
    objective, index = Objective(get_process(name)), torch.arange(3)
    start = normal(5, "sample/start", index, (1, 4, 4))
    if sampler in ("ddpm", "euler_maruyama"):
        with pytest.raises(ValueError, match=r"start.*seed, index, shape"):
            sampled(objective, crooked_network, start, sampler=sampler, steps=4)
    else:
        given = sampled(objective, crooked_network, start, sampler=sampler, steps=4)
        assert torch.equal(given, sampled(objective, crooked_network, (5, index, (1, 4, 4)), sampler=sampler, steps=4))


@pytest.mark.parametrize(("name", "sampler"), [pair for pair in EVERY_PAIR if pair[0] != "edm"])
def test_the_condition_reaches_the_network_and_clip_bounds_its_image(name, sampler):
    """A network that always predicts its label samples the label; Euler-Maruyama to the size of its last step."""
    level = torch.tensor([-5.0, 0.25, 3.0]).view(3, 1, 1, 1)
    options = {"sampler": sampler, "steps": 200 if sampler == "euler_maruyama" else 20, "level": level}
    start = (0, torch.arange(3), SHAPE)

    def net(x, time, level):
        return level.expand_as(x)

    close = 0.01 if sampler == "euler_maruyama" else 1e-4
    free = sampled(Objective(get_process(name), "x0"), net, start, **options)
    torch.testing.assert_close(free, level.expand_as(free), rtol=0, atol=close)
    clipped = sampled(Objective(get_process(name), "x0"), net, start, clip=True, **options)
    torch.testing.assert_close(clipped, level.clamp(-1, 1).expand_as(free), rtol=0, atol=close)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm++2m", "dpm++3m", "heun"])
def test_clip_bounds_edm_images_too(sampler):
    def net(x, time):
        """F for which D(x; sigma) is 3 everywhere, with EDM's Table 1."""
        sigma = (4 * time).exp().view(-1, 1, 1, 1)
        c_in, c_skip = (sigma**2 + 0.25) ** -0.5, 0.25 / (sigma**2 + 0.25)
        return (3 - c_skip * x / c_in) / (0.5 * sigma * c_in)

    for clip, level in ((False, 3.0), (True, 1.0)):
        out = sampled(Objective(EDM()), net, (0, torch.arange(2), SHAPE), sampler=sampler, steps=20, clip=clip)
        torch.testing.assert_close(out, torch.full_like(out, level), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_the_network_is_evaluated_at_the_times_of_the_process(name, sampler):
    process, asked = get_process(name), []

    def net(x, time):
        assert x.dtype == torch.float32 and not torch.is_grad_enabled() and time.shape == (2,)
        asked.append(time[0])
        return 0.1 * x

    start = (0, torch.arange(2), SHAPE)
    out = sampled(Objective(process), net, start, sampler=sampler, steps=5)
    spacing = "snr" if sampler in ("heun", "dpm++2m", "dpm++3m") and name != "edm" else ""
    want = process.network_time(process.sampling_times(5, spacing)).tolist()
    if sampler == "heun":
        want = [want[0], *(t for t in want[1:] for _ in range(2))]
    assert [t.item() for t in asked] == pytest.approx(want, rel=1e-6)
    assert asked[0].dtype == (torch.int64 if name == "ddpm" else torch.float32)
    assert out.dtype == torch.float32 and out.shape == (2, *SHAPE)


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_nothing_is_read_back_from_the_device(name, sampler):
    """Meta tensors hold no values, so a step that waited for one would fail, and one that mixed devices too."""
    start = (0, torch.arange(3, device="meta"), SHAPE)
    out = sampled(Objective(get_process(name)), lambda x, time: 0.1 * x, start, sampler=sampler, steps=5, clip=True)
    assert out.device.type == "meta" and out.shape == (3, *SHAPE)


def test_defaults():
    def steps_of(process, sampler=""):
        return resolve_sampling(SamplingSettings(sampler), process).steps

    defaults = {name: resolve_sampling(SamplingSettings(), get_process(name)).sampler for name in PROCESSES}
    assert defaults == {"vp": "dpm++2m", "ddpm": "dpm++2m", "cosine": "dpm++2m", "edm": "heun", "flow": "dpm++2m"}
    assert steps_of(VPSDE()) == 50 and steps_of(EDM()) == 18
    assert steps_of(VPSDE(), "euler_maruyama") == 1000
    assert steps_of(DDPM(num_steps=70), "ddpm") == 70
    chosen = sampled(Objective(EDM()), crooked_network, (0, torch.arange(1), (1, 4, 4)))
    assert torch.equal(
        chosen, sampled(Objective(EDM()), crooked_network, (0, torch.arange(1), (1, 4, 4)), sampler="heun")
    )


@pytest.mark.parametrize("sampler", ["ddim", "dpm++2m", "heun"])
def test_one_step_is_the_denoised_noise(sampler):
    objective = Objective(VPSDE())
    start = normal(1, "sample/start", torch.arange(3), SHAPE)
    x0, _ = objective.denoise(BestNetwork(objective), start, torch.ones(3))
    got = sampled(objective, BestNetwork(objective), start, sampler=sampler, steps=1)
    torch.testing.assert_close(got, x0, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("process", "options", "words"),
    [
        (
            VPSDE(),
            {"sampler": "dpm++"},
            ["sampling.sampler", "'dpm++'", "did you mean 'dpm++", "heun, euler_maruyama"],
        ),
        (DDPM(), {"sampler": "euler_maruyama"}, ["sampling.sampler", "continuous", "'ddpm'"]),
        (EDM(), {"sampler": "euler_maruyama"}, ["sampling.sampler", "vp, cosine", "'edm'"]),
        (DDPM(), {"sampler": "ddim", "steps": 1001}, ["sampling.steps", "1001", "1000"]),
        (VPSDE(), {"steps": -1}, ["sampling.steps", "at least 0", "-1"]),
        (VPSDE(), {"batch_size": 0}, ["sampling.batch_size", "at least 1", "got 0"]),
        (VPSDE(), {"precision": "fp8"}, ["sampling.precision", "'fp8'", "fp32, bf16, fp16"]),
        (VPSDE(), {"guidance": 2.0}, ["sampling.guidance", "null"]),
        (EDM(), {"spacing": "time"}, ["sampling.spacing", "'time'", "karras"]),
    ],
)
def test_impossible_requests_are_refused_before_the_network_runs(process, options, words):
    def net(x, time):
        raise AssertionError("the network was called")

    with pytest.raises(ValueError) as caught:
        sampled(Objective(process), net, (0, torch.arange(2), SHAPE), **options)
    for word in words:
        assert word in str(caught.value)


NULL = {"class_labels": torch.tensor([7])}


class Counting:
    """A network whose output is 0.1 x plus its label, and which remembers the batches it saw."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        self.batches.append(len(x))
        assert len(time) == len(class_labels) == len(x)
        return 0.1 * x + class_labels.float()[:, None]


def test_the_formula_in_one_doubled_batch() -> None:
    net, x, labels = Counting(), torch.randn(3, 4), torch.tensor([1, 2, 3])
    found = guided(net, NULL, 2.5)(x, torch.ones(3), class_labels=labels)
    expected = 0.1 * x + (7 + 2.5 * (labels - 7.0))[:, None]
    torch.testing.assert_close(found, expected)
    assert net.batches == [6]


def test_the_null_condition_moves_to_the_device_of_the_condition() -> None:
    labels = torch.tensor([1, 2, 3], device="meta")
    found = guided(Counting(), NULL, 2.5)(
        torch.randn(3, 4, device="meta"), torch.ones(3, device="meta"), class_labels=labels
    )
    assert found.is_meta


def test_scale_one_is_the_network_itself() -> None:
    net = Counting()
    assert guided(net, NULL, 1.0) is net
    objective, start = Objective(get_process("vp")), torch.randn(2, 4)
    labels = torch.tensor([1, 2])
    plain = sampled(objective, net, start, steps=4, class_labels=labels)
    assert torch.equal(sampled(objective, net, start, steps=4, null=NULL, class_labels=labels), plain)
    assert set(net.batches) == {2}


def test_outside_the_interval_the_condition_acts_alone() -> None:
    objective, start = Objective(get_process("edm")), torch.randn(2, 4)
    net = Counting()
    options = {"sampler": "ddim", "steps": 12, "guidance": 3.0, "guidance_interval": (0.5, 10.0)}
    sampled(objective, net, start, null=NULL, class_labels=torch.tensor([1, 2]), **options)
    levels = objective.process.sampling_times(12, "").tolist()  # of EDM a time is a noise level
    assert net.batches == [4 if 0.5 <= level <= 10.0 else 2 for level in levels]
    assert {2, 4} == set(net.batches)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_wrong_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"sampling\.guidance: must be (at least 0|a finite number)"):
        resolve_sampling(SamplingSettings(guidance=scale), get_process("vp"))


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.guidance_interval: must be 0 <= low < high"):
        resolve_sampling(SamplingSettings(guidance_interval=(2.0, 1.0)), get_process("vp"))


def test_diffusion_and_evaluation_are_imported_and_heun_samples_without_diffusers() -> None:
    code = """
import sys
sys.modules["diffusers"] = None
import torch, scalelong.evaluation, scalelong.training
from scalelong.diffusion import EDM, Objective, sample
print(sample(Objective(EDM()), lambda x, time: 0 * x, (0, torch.arange(2), (1, 4, 4))).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([2, 1, 4, 4])\n"
