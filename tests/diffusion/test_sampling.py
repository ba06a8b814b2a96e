"""With the best network for Gaussian data every sampler is an affine map of its noises, so pushing unit vectors through it
gives the mean and covariance of what it draws with no Monte Carlo error."""

import diffusers
import pytest
import torch

from scalelong.diffusion import DDPM, EDM, PROCESSES, SAMPLERS, VPSDE, Objective, default_sampler, get_process, sample
from scalelong.diffusion import sampling as sampling_module
from scalelong.random import normal
from tests.diffusion.gaussian_oracle import MEAN, MODES, SHAPE, VARIANCES, BestNetwork, flat, image

torch.set_num_threads(1)
ODE_SAMPLERS = ["ddim", "dpm++2m", "dpm++3m", "heun"]
EVERY_PAIR = [(p, s) for p in PROCESSES for s in SAMPLERS if s != "euler_maruyama" or p in ("vp", "cosine")]


def ode_map(objective, **options):
    """(offset, matrix) of the affine map a deterministic sampler makes from starting noise (D,) to image (D,)."""
    start = image(torch.cat([torch.zeros(1, 4), torch.eye(4)]))
    out = flat(sample(objective, BestNetwork(objective), start, **options))
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
        out = flat(sample(objective, BestNetwork(objective), (0, index, SHAPE), steps=steps, **options))
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
}  # fmt: skip


@pytest.mark.parametrize(("name", "sampler"), ODE_ERROR)
def test_ode_samplers_draw_the_data(name, sampler):
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
    ("vp", "ddpm", 0.0): (100, 0.376, 0.234),
    ("cosine", "ddpm", 0.0): (100, 0.231, 0.135),
    ("ddpm", "ddpm", 0.0): (100, 0.374, 0.232),
    ("edm", "ddpm", 0.0): (100, 0.167, 0.0875),
    ("vp", "ddim", 0.5): (100, 0.241, 0.137),
    ("vp", "euler_maruyama", 0.0): (200, 0.0192, 0.0043),
    ("cosine", "euler_maruyama", 0.0): (100, 0.0195, 0.009),
}


@pytest.mark.parametrize(("name", "sampler", "eta"), SDE_ERROR)
def test_stochastic_samplers_draw_the_data(monkeypatch, name, sampler, eta):
    objective = Objective(get_process(name))
    steps, *bounds = SDE_ERROR[name, sampler, eta]
    errors = []
    for n in (steps, 2 * steps):
        mean, covariance = mean_and_covariance(monkeypatch, objective, n, sampler=sampler, eta=eta)
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
    """diffusers' DDPMScheduler, told to use our noise, draws the same images."""
    process, steps, index = DDPM(num_steps=40, beta_end=0.3), 40, torch.arange(5)
    objective = Objective(process, prediction)
    got = sample(objective, BestNetwork(objective), (9, index, SHAPE), sampler="ddpm", steps=steps)

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
        sample(Objective(VPSDE(), p), BestNetwork(Objective(VPSDE(), p)), start, sampler=sampler, steps=30)
        for p in ("noise", "x0", "v")
    )
    torch.testing.assert_close(noise, x0, rtol=0, atol=1e-3)
    torch.testing.assert_close(noise, v, rtol=0, atol=1e-3)


def crooked_network(x, time):
    """Not linear, and different at every pixel and time."""
    return (x * 1.3 + torch.arange(16.0).view(1, 4, 4) / 9).tanh() + 0.1 * (time.view(-1, 1, 1, 1) / 100).sin()


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_an_image_depends_on_its_index_alone(name, sampler):
    """Neither on the size of the batch, nor on its place in it, nor on the other images."""
    objective, shape = Objective(get_process(name)), (1, 4, 4)
    eta = 0.7 if sampler == "ddim" else 0.0

    def draw(*index):
        start = (11, torch.tensor(index), shape)
        return sample(objective, crooked_network, start, sampler=sampler, steps=6, eta=eta)

    together = draw(*range(8))
    apart = torch.cat([draw(0, 1, 2), draw(3, 4, 5, 6, 7)])
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(draw(7, 2), together[[7, 2]], rtol=1e-6, atol=1e-6)
    assert (together[:, None] - together[None]).abs().amax((2, 3, 4)).fill_diagonal_(1).min() > 1e-2


@pytest.mark.parametrize("sampler", ["ddpm", "dpm++2m"])
def test_another_seed_is_another_image(sampler):
    one, other = (
        sample(Objective(VPSDE()), crooked_network, (seed, torch.arange(2), (1, 4, 4)), sampler=sampler, steps=5)
        for seed in (0, 1)
    )
    assert (one - other).abs().amax((1, 2, 3)).min() > 1e-2


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_starting_noise_given_or_drawn_is_the_same(name, sampler):
    objective, index = Objective(get_process(name)), torch.arange(3)
    start = normal(5, "sample/start", index, (1, 4, 4))
    if sampler in ("ddpm", "euler_maruyama"):
        with pytest.raises(ValueError, match=r"diffusion.start.*seed, index, shape"):
            sample(objective, crooked_network, start, sampler=sampler, steps=4)
    else:
        given = sample(objective, crooked_network, start, sampler=sampler, steps=4)
        assert torch.equal(given, sample(objective, crooked_network, (5, index, (1, 4, 4)), sampler=sampler, steps=4))


@pytest.mark.parametrize(("name", "sampler"), [pair for pair in EVERY_PAIR if pair[0] != "edm"])
def test_the_condition_reaches_the_network_and_clip_bounds_its_image(name, sampler):
    """A network that always answers with its label draws the label; Euler-Maruyama to the size of its last step."""
    level = torch.tensor([-5.0, 0.25, 3.0]).view(3, 1, 1, 1)
    options = {"sampler": sampler, "steps": 200 if sampler == "euler_maruyama" else 20, "level": level}
    start = (0, torch.arange(3), SHAPE)

    def net(x, time, level):
        return level.expand_as(x)

    close = 0.01 if sampler == "euler_maruyama" else 1e-4
    free = sample(Objective(get_process(name), "x0"), net, start, **options)
    torch.testing.assert_close(free, level.expand_as(free), rtol=0, atol=close)
    clipped = sample(Objective(get_process(name), "x0"), net, start, clip=True, **options)
    torch.testing.assert_close(clipped, level.clamp(-1, 1).expand_as(free), rtol=0, atol=close)


@pytest.mark.parametrize("sampler", ["ddpm", *ODE_SAMPLERS])
def test_clip_bounds_edm_images_too(sampler):
    def net(x, time):
        """F for which D(x; sigma) is 3 everywhere, with EDM's Table 1."""
        sigma = (4 * time).exp().view(-1, 1, 1, 1)
        c_in, c_skip = (sigma**2 + 0.25) ** -0.5, 0.25 / (sigma**2 + 0.25)
        return (3 - c_skip * x / c_in) / (0.5 * sigma * c_in)

    for clip, level in ((False, 3.0), (True, 1.0)):
        out = sample(Objective(EDM()), net, (0, torch.arange(2), SHAPE), sampler=sampler, steps=20, clip=clip)
        torch.testing.assert_close(out, torch.full_like(out, level), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_the_network_is_asked_at_the_times_of_the_process(name, sampler):
    process, asked, told = get_process(name), [], []

    def net(x, time):
        assert x.dtype == torch.float32 and not torch.is_grad_enabled() and time.shape == (2,)
        asked.append(time[0])
        return 0.1 * x

    start = (0, torch.arange(2), SHAPE)
    out = sample(Objective(process), net, start, sampler=sampler, steps=5, progress=lambda *at: told.append(at))
    spacing = "snr" if sampler in ("heun", "dpm++2m", "dpm++3m") and name != "edm" else ""
    want = process.network_time(process.sampling_times(5, spacing)).tolist()
    if sampler == "heun":
        want = [want[0], *(t for t in want[1:] for _ in range(2))]
    assert [t.item() for t in asked] == pytest.approx(want, rel=1e-6)
    assert asked[0].dtype == (torch.int64 if name == "ddpm" else torch.float32)
    assert told == [(i + 1, 5) for i in range(5)] and out.dtype == torch.float32 and out.shape == (2, *SHAPE)


@pytest.mark.parametrize(("name", "sampler"), EVERY_PAIR)
def test_nothing_is_read_back_from_the_device(name, sampler):
    """Meta tensors hold no values, so a step that waited for one would fail, and one that mixed devices too."""
    start = (0, torch.arange(3, device="meta"), SHAPE)
    out = sample(Objective(get_process(name)), lambda x, time: 0.1 * x, start, sampler=sampler, steps=5, clip=True)
    assert out.device.type == "meta" and out.shape == (3, *SHAPE)


def test_defaults():
    calls = []

    def steps_of(process, **options):
        calls.clear()
        sample(
            Objective(process),
            crooked_network,
            (0, torch.arange(1), (1, 4, 4)),
            progress=lambda *at: calls.append(at),
            **options,
        )
        return calls[-1][1]

    assert [default_sampler(get_process(name)) for name in ("vp", "ddpm", "cosine", "edm")] == ["dpm++2m"] * 3 + [
        "heun"
    ]
    assert steps_of(VPSDE()) == 50 and steps_of(EDM()) == 18
    assert steps_of(VPSDE(), sampler="euler_maruyama") == 1000
    assert steps_of(DDPM(num_steps=70), sampler="ddpm") == 70
    chosen = sample(Objective(EDM()), crooked_network, (0, torch.arange(1), (1, 4, 4)))
    assert torch.equal(
        chosen, sample(Objective(EDM()), crooked_network, (0, torch.arange(1), (1, 4, 4)), sampler="heun")
    )


@pytest.mark.parametrize("sampler", ["ddim", "dpm++2m", "heun"])
def test_one_step_is_the_denoised_noise(sampler):
    objective = Objective(VPSDE())
    start = normal(1, "sample/start", torch.arange(3), SHAPE)
    x0, _ = objective.denoise(BestNetwork(objective), start, torch.ones(3))
    got = sample(objective, BestNetwork(objective), start, sampler=sampler, steps=1)
    torch.testing.assert_close(got, x0, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("process", "options", "words"),
    [
        (
            VPSDE(),
            {"sampler": "dpm++"},
            ["diffusion.sampler", "'dpm++'", "did you mean 'dpm++", "heun, euler_maruyama"],
        ),
        (DDPM(), {"sampler": "euler_maruyama"}, ["diffusion.sampler", "continuous", "'ddpm'"]),
        (EDM(), {"sampler": "euler_maruyama"}, ["diffusion.sampler", "vp, cosine", "'edm'"]),
        (DDPM(), {"sampler": "ddim", "steps": 1001}, ["diffusion.steps", "1001", "1000"]),
        (VPSDE(), {"steps": -1}, ["diffusion.steps", "at least 1", "-1"]),
        (VPSDE(), {"sampler": "heun", "eta": 0.5}, ["diffusion.eta", "ddim", "0.5"]),
        (VPSDE(), {"sampler": "ddim", "eta": 1.5}, ["diffusion.eta", "[0, 1]", "1.5"]),
        (EDM(), {"spacing": "time"}, ["diffusion.spacing", "'time'", "karras"]),
    ],
)
def test_impossible_requests_are_refused_before_the_network_runs(process, options, words):
    def net(x, time):
        raise AssertionError("the network was called")

    with pytest.raises(ValueError) as caught:
        sample(Objective(process), net, (0, torch.arange(2), SHAPE), **options)
    for word in words:
        assert word in str(caught.value)
