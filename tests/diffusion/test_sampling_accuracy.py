"""With the best network for Gaussian data every sampler is an affine map of its noises, so pushing unit vectors through it
gives the mean and covariance of its samples with no Monte Carlo error."""

import diffusers
import pytest
import torch

from scalelong.diffusion import DDPM, EDM, VPSDE, Objective, get_process
from scalelong.diffusion import sampling as sampling_module
from scalelong.random import normal
from tests.diffusion.gaussian_oracle import MEAN, MODES, SHAPE, VARIANCES, BestNetwork, flat, image, sampled

ODE_SAMPLERS = ["ddim", "dpm++2m", "dpm++3m", "heun"]


def ode_map(objective, **options):
    """(offset, matrix) of the affine map a deterministic sampler makes from starting noise (D,) to image (D,)."""
    start = image(torch.cat([torch.zeros(1, 4), torch.eye(4)]))
    out = flat(sampled(objective, BestNetwork(objective), start, **options))
    return out[0], (out[1:] - out[0]).T


def exact_ode_map(process, steps):
    """What the map tends to: the exact flow between the first and the last time asked for, then x0_hat."""
    times = process.sampling_times(steps)[[0, -1]].double()
    alpha, sigma = process.marginal(times)
    first, last = (alpha[:, None] ** 2 * VARIANCES + sigma[:, None] ** 2).unbind(0)
    gain = (last / first).sqrt() * alpha[1] * VARIANCES / last
    matrix = MODES @ torch.diag(gain) @ MODES.T
    return MEAN - alpha[0] * matrix @ MEAN, matrix * process.prior_std


class Impulses:
    """Stands in for the random numbers: image 0 gets only zeros, every other image a 1 in one place of one stream."""

    def __init__(self):
        self.streams = []

    def __call__(self, seed, stream, index, shape):
        if stream not in self.streams:
            self.streams.append(stream)
        place = index - 1 - 4 * self.streams.index(stream)
        return image(torch.where(place[:, None] == torch.arange(4), 1.0, 0.0))


def mean_and_covariance(monkeypatch, objective, steps, **options):
    impulses = Impulses()
    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "normal", impulses)
        index = torch.arange(1 + 4 * (steps + 1))
        out = flat(sampled(objective, BestNetwork(objective), (0, index, SHAPE), steps=steps, **options))
    response = out[1:] - out[0]
    return out[0], response.T @ response


def relative_error(covariance):
    """The largest relative error of the variance in any direction."""
    scaled = torch.diag(VARIANCES**-0.5) @ MODES.T @ covariance @ MODES @ torch.diag(VARIANCES**-0.5)
    return (torch.linalg.eigvalsh(scaled) - 1).abs().max().item()


# Largest relative error of a variance at 50 steps (the variances go down to 0.02), measured, and a quarter more.
ODE_ERROR = {
    ("vp", "ddim"): 0.38, ("vp", "dpm++2m"): 0.0058, ("vp", "dpm++3m"): 0.0046, ("vp", "heun"): 0.0125,
    ("cosine", "ddim"): 0.21, ("cosine", "dpm++2m"): 0.0062, ("cosine", "dpm++3m"): 0.0024, ("cosine", "heun"): 0.014,
    ("ddpm", "ddim"): 0.38, ("ddpm", "dpm++2m"): 0.006, ("ddpm", "dpm++3m"): 0.0038, ("ddpm", "heun"): 0.0127,
    ("edm", "ddim"): 0.165, ("edm", "dpm++2m"): 0.0235, ("edm", "dpm++3m"): 0.0028, ("edm", "heun"): 0.0225,
    ("flow", "ddim"): 0.156, ("flow", "dpm++2m"): 0.0147, ("flow", "dpm++3m"): 0.0076, ("flow", "heun"): 0.0295,
}  # fmt: skip


@pytest.mark.parametrize(("name", "sampler"), ODE_ERROR)
def test_ode_samplers_sample_the_data_distribution(name, sampler):
    """The mean is off by what starting from mean 0 instead of alpha MEAN leaves, at most 0.007."""
    mean, matrix = ode_map(Objective(get_process(name)), sampler=sampler, steps=50)
    assert relative_error(matrix @ matrix.T) < ODE_ERROR[name, sampler]
    torch.testing.assert_close(mean, MEAN, rtol=0, atol=0.008)


# How much the distance to the exact flow falls from 100 to 200 steps: 2 for order 1, 4 for order 2.
FALL = {"ddim": (1.95, 2.05), "dpm++2m": (3.4, 4.3), "dpm++3m": (3.5, 6.0), "heun": (3.9, 4.3)}


@pytest.mark.parametrize(("name", "sampler"), ODE_ERROR)
def test_ode_samplers_converge_to_the_exact_flow(name, sampler):
    objective = Objective(get_process(name))
    spacing = {"edm": "karras", "ddpm": "time"}.get(name, "snr")  # a grid that keeps its shape as it is refined

    def distance(steps):
        want = torch.cat([part.flatten() for part in exact_ode_map(objective.process, steps)])
        got = torch.cat([part.flatten() for part in ode_map(objective, sampler=sampler, steps=steps, spacing=spacing)])
        return (got - want).abs().max().item()

    low, high = FALL[sampler]
    assert low < distance(100) / distance(200) < high


@pytest.mark.parametrize("name", ["vp", "cosine", "edm"])
def test_a_higher_order_is_closer(name):
    error = {}
    for sampler in ODE_SAMPLERS:
        _, matrix = ode_map(Objective(get_process(name)), sampler=sampler, steps=100)
        _, want = exact_ode_map(get_process(name), 100)
        error[sampler] = (matrix - want).abs().max().item()
    assert error["dpm++3m"] < 0.5 * error["dpm++2m"] < 0.1 * error["ddim"]
    assert error["heun"] < 0.1 * error["ddim"]


def test_even_log_snr_is_what_fine_detail_needs():
    for sampler, factor in (("dpm++2m", 30), ("heun", 3)):
        error = {}
        for spacing in ("time", "snr", ""):
            _, matrix = ode_map(Objective(VPSDE()), sampler=sampler, steps=50, spacing=spacing)
            error[spacing] = relative_error(matrix @ matrix.T)
        assert error[""] == error["snr"] < error["time"] / factor


@pytest.mark.parametrize("sampler", ODE_SAMPLERS)
def test_a_sigma_that_float32_alpha_bar_cannot_hold(sampler):
    process = EDM(sigma_min=1e-4)
    offset, matrix = ode_map(Objective(process), sampler=sampler, steps=400)
    want_offset, want_matrix = exact_ode_map(process, 400)
    close = 0.01 if sampler == "ddim" else 3e-4
    torch.testing.assert_close(matrix, want_matrix, rtol=0, atol=close)
    torch.testing.assert_close(offset, want_offset, rtol=0, atol=close)


# Largest relative error of a variance at (steps, 2 * steps), measured, and a quarter more. Ancestral steps are known to
# lose fine detail (their variance is right for a single image as data), and the loss halves with the steps.
SDE_ERROR = {
    ("vp", "ddpm"): (100, 0.376, 0.234),
    ("cosine", "ddpm"): (100, 0.231, 0.135),
    ("ddpm", "ddpm"): (100, 0.374, 0.232),
    ("edm", "ddpm"): (100, 0.167, 0.0875),
    ("vp", "euler_maruyama"): (200, 0.0192, 0.0043),
    ("cosine", "euler_maruyama"): (100, 0.0195, 0.009),
}


@pytest.mark.parametrize(("name", "sampler"), SDE_ERROR)
def test_stochastic_samplers_sample_the_data_distribution(monkeypatch, name, sampler):
    objective = Objective(get_process(name))
    steps, *bounds = SDE_ERROR[name, sampler]
    errors = []
    for n in (steps, 2 * steps):
        mean, covariance = mean_and_covariance(monkeypatch, objective, n, sampler=sampler)
        torch.testing.assert_close(mean, MEAN, rtol=0, atol=0.005)
        errors.append(relative_error(covariance))
    assert errors[0] < bounds[0] and errors[1] < bounds[1]
    assert errors[1] < errors[0] / 1.5


def test_a_thousand_euler_maruyama_steps_are_within_a_third_of_a_percent(monkeypatch):
    mean, covariance = mean_and_covariance(monkeypatch, Objective(VPSDE()), 1000, sampler="euler_maruyama")
    assert relative_error(covariance) < 0.0035
    torch.testing.assert_close(mean, MEAN, rtol=0, atol=5e-4)


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_ancestral_sampling_is_the_peer_s(monkeypatch, prediction):
    """diffusers' DDPMScheduler, given our noise, samples the same images."""
    process, steps, index = DDPM(num_steps=40, beta_end=0.3), 40, torch.arange(5)
    objective = Objective(process, prediction)
    got = sampled(objective, BestNetwork(objective), (9, index, SHAPE), sampler="ddpm", steps=steps)

    kind = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}[prediction]
    peer = diffusers.DDPMScheduler(steps, 1e-4, 0.3, clip_sample=False, prediction_type=kind)
    peer.set_timesteps(steps)
    x = normal(9, "sample/start", index, SHAPE)
    for i, t in enumerate(peer.timesteps):
        step_noise = normal(9, f"sample/{i}", index, SHAPE)
        monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, n=step_noise, **__: n)
        x = peer.step(BestNetwork(objective)(x, t.expand(5)), t, x).prev_sample
    torch.testing.assert_close(got, x, rtol=0, atol=1e-4)
    assert got.std() > 0.3


@pytest.mark.parametrize("sampler", ["ddim", "dpm++3m", "heun", "euler_maruyama"])
def test_noise_x0_and_v_networks_give_the_same_images(sampler):
    start = (4, torch.arange(4), SHAPE)
    noise, x0, v = (
        sampled(Objective(VPSDE(), p), BestNetwork(Objective(VPSDE(), p)), start, sampler=sampler, steps=30)
        for p in ("noise", "x0", "v")
    )
    torch.testing.assert_close(noise, x0, rtol=0, atol=1e-3)
    torch.testing.assert_close(noise, v, rtol=0, atol=1e-3)
