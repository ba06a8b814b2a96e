import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from scalelong.diffusion import DDPM, EDM, PROCESSES, VPSDE, Cosine, get_process
from scalelong.random import normal, uniform

PRESERVING = [VPSDE(), VPSDE(0.5, 12.0), Cosine(), DDPM(), DDPM(num_steps=100, beta_end=0.1)]
CONTINUOUS = [VPSDE(), VPSDE(0.5, 12.0), Cosine(), Cosine(offset=0.1)]


def grid(process, points=999):
    """Training times from the cleanest to the noisiest, float64."""
    return process.time_from_uniform((torch.arange(points, dtype=torch.float64) + 0.5) / points).double()


@pytest.mark.parametrize("process", PRESERVING, ids=repr)
def test_variance_is_preserved(process):
    alpha, sigma = process.marginal(grid(process))
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(alpha), rtol=0, atol=1e-14)


@pytest.mark.parametrize("process", [*PRESERVING, EDM()], ids=repr)
def test_signal_to_noise_only_falls(process):
    alpha, sigma = process.marginal(grid(process, 100))
    assert (torch.diff((alpha / sigma).log()) < 0).all()


@pytest.mark.parametrize("process", [VPSDE(), Cosine(), DDPM()], ids=repr)
def test_clean_at_the_start_and_noise_at_the_end(process):
    alpha, sigma = process.marginal(process.sampling_times(2).double())
    assert alpha[0] < 0.01 and alpha[1] > 0.9999
    assert sigma[0] > 0.9999 and sigma[1] < 0.011


def test_vp_closed_form_is_the_integral_of_beta():
    times = np.linspace(0, 1, 100_001)
    beta = 0.1 + 19.9 * times
    integral = np.concatenate([[0], np.cumsum((beta[1:] + beta[:-1]) / 2 * np.diff(times))])[::10_000]
    alpha, _ = VPSDE().marginal(torch.linspace(0, 1, 11, dtype=torch.float64))
    np.testing.assert_allclose(alpha.numpy(), np.exp(-0.5 * integral), rtol=1e-12)


@pytest.mark.parametrize("process", CONTINUOUS, ids=repr)
def test_beta_is_the_slope_of_log_alpha_bar(process):
    t = torch.linspace(0.001, 0.99, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((2 * process.marginal(t)[0].log()).sum(), t)
    torch.testing.assert_close(process.beta(t.detach()), -slope, rtol=1e-10, atol=0)


@pytest.mark.parametrize("offset", [0.008, 0.1])
def test_cosine_is_nichol_and_dhariwal_eq_17(offset):
    t = np.linspace(0, 1, 50)
    f = np.cos((t + offset) / (1 + offset) * np.pi / 2) ** 2
    alpha, _ = Cosine(offset).marginal(torch.from_numpy(t))
    np.testing.assert_allclose(alpha.square().numpy(), f / f[0], rtol=1e-9, atol=1e-15)


def test_ddpm_is_the_peer_schedule():
    alpha, _ = DDPM().marginal(torch.arange(1000))
    torch.testing.assert_close(alpha.square(), DDPMScheduler().alphas_cumprod, rtol=2e-5, atol=0)
    alpha, sigma = DDPM().marginal(torch.tensor([0, 1]))
    assert alpha[0] ** 2 == pytest.approx(0.9999, abs=1e-7)
    second = 1e-4 + (0.02 - 1e-4) / 999
    assert sigma[1] ** 2 == pytest.approx(1 - 0.9999 * (1 - second), rel=1e-5)


@pytest.mark.parametrize("process", [VPSDE(), Cosine(), DDPM()], ids=repr)
def test_float32_keeps_the_digits_of_a_small_sigma(process):
    """sigma = sqrt(1 - alpha^2) in float32 would be off by up to 100% here."""
    t = torch.tensor([0, 1]) if process.name == "ddpm" else torch.tensor([1e-7, 1e-5, 1e-3])
    for low, high in zip(process.marginal(t), process.marginal(t.double()), strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-6, atol=0)


@pytest.mark.parametrize("process", [VPSDE(), Cosine(), EDM()], ids=repr)
def test_low_precision_times_do_not_lower_the_schedule(process):
    t = torch.tensor([0.25, 0.5], dtype=torch.bfloat16)
    for low, full in zip(process.marginal(t), process.marginal(t.float()), strict=True):
        assert low.dtype == torch.float32 and torch.equal(low, full)
    assert process.network_time(t).dtype == process.input_scale(t).dtype == torch.float32


def test_mean_alpha_bar_of_lemma_3_2():
    beta = np.linspace(1e-4, 0.02, 1000)
    assert DDPM().mean_alpha_bar() == pytest.approx(np.cumprod(1 - beta).mean(), rel=1e-9)
    assert DDPM().mean_alpha_bar() == pytest.approx(0.2755, abs=1e-4)
    assert VPSDE().mean_alpha_bar() == pytest.approx(0.2760, abs=1e-4)


def test_the_paper_s_printed_product_needs_no_square_root():
    """The proof of Lemma 3.2 prints a product of square roots and the value 0.27: that is alpha-bar without the root."""
    beta = 0.02 * np.arange(1, 1001) / 1000
    assert np.cumprod(1 - beta).mean() == pytest.approx(0.279, abs=1e-3)
    assert np.cumprod(np.sqrt(1 - beta)).mean() == pytest.approx(0.394, abs=1e-3)
    assert DDPM().mean_alpha_bar() == pytest.approx(np.cumprod(1 - beta).mean(), abs=5e-3)


def test_training_times_cover_the_process_evenly():
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.equal(DDPM().time_from_uniform(u), torch.arange(1000))
    torch.testing.assert_close(VPSDE().time_from_uniform(u), u.float())
    torch.testing.assert_close(Cosine().time_from_uniform(u), u.float())


def test_edm_training_sigma_is_log_normal():
    u = torch.tensor([0.5, 0.841344746068543, 0.022750131948179], dtype=torch.float64)  # 0, +1 and -2 deviations
    torch.testing.assert_close(EDM().time_from_uniform(u).log(), torch.tensor([-1.2, 0.0, -3.6]), rtol=0, atol=1e-6)
    other = EDM(p_mean=0.5, p_std=2.0).time_from_uniform(u).log()
    torch.testing.assert_close(other, torch.tensor([0.5, 2.5, -3.5]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_ends_of_u_are_usable_times(name):
    process = get_process(name)
    t = process.time_from_uniform(torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64))
    alpha, sigma = process.marginal(t)
    for value in (alpha, sigma, process.network_time(t), process.input_scale(t)):
        assert torch.isfinite(value).all()
    assert torch.equal(process.marginal(t.sort().values)[1], sigma)  # still in order
    assert (alpha > 0).all()


def test_what_the_network_is_fed():
    assert VPSDE().network_time(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 499.5, 999.0]
    index = DDPM().network_time(torch.tensor([0, 999]))
    assert index.dtype == torch.int64 and index.tolist() == [0, 999]
    sigma = torch.tensor([0.002, 1.0, 80.0])
    torch.testing.assert_close(EDM().network_time(sigma), torch.tensor([-1.55365, 0.0, 1.09551]), rtol=0, atol=1e-5)
    torch.testing.assert_close(EDM().input_scale(sigma), 1 / (0.25 + sigma**2).sqrt())
    assert VPSDE().input_scale(torch.rand(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("steps", [1, 2, 50, 300, 999, 1000])
def test_sampling_times_fall_from_end_to_end(name, steps):
    process = get_process(name)
    ends = {"vp": (1.0, 1e-3), "cosine": (0.9946, 1e-3), "ddpm": (999, 0), "edm": (80.0, 0.002), "flow": (0.999, 1e-3)}[
        name
    ]
    for spacing in process.spacings:
        times = process.sampling_times(steps, spacing)
        assert len(times) == steps and (torch.diff(times) < 0).all()
        assert times[0].item() == pytest.approx(ends[0])
        assert steps == 1 or times[-1].item() == pytest.approx(ends[1])


@pytest.mark.parametrize("process", [VPSDE(), Cosine()], ids=repr)
def test_snr_spacing_is_even_in_log_snr(process):
    alpha, sigma = process.marginal(process.sampling_times(50, "snr"))
    rise = torch.diff((alpha / sigma).log())
    assert rise.max() / rise.min() < 1.01
    alpha, sigma = process.marginal(process.sampling_times(50, "time"))
    assert torch.diff((alpha / sigma).log()).max() > 5 * rise.max()


def test_ddpm_snr_spacing_is_as_even_as_indices_allow():
    times = DDPM().sampling_times(20, "snr")
    alpha, sigma = DDPM().marginal(times.double())
    rise = torch.diff((alpha / sigma).log())[:14]  # the last few indices are further apart than an even step
    assert rise.max() / rise.min() < 1.3


def test_edm_times_are_eq_5():
    sigma = EDM().sampling_times(18)
    i = np.arange(18)
    want = (80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    np.testing.assert_allclose(sigma.numpy(), want, rtol=1e-12)
    linear = EDM(rho=1.0, sigma_min=1.0, sigma_max=3.0).sampling_times(3)
    torch.testing.assert_close(linear, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))


def test_get_process_by_name():
    assert [type(get_process(name)) for name in ("vp", "ddpm", "cosine", "edm")] == [VPSDE, DDPM, Cosine, EDM]
    assert EDM(sigma_max=10.0).prior_std == 10.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: get_process("cosin"),
            ["diffusion.process", "'cosin'", "did you mean 'cosine'", "vp, ddpm, cosine, edm"],
        ),
        (lambda: VPSDE(beta_min=0.0), ["diffusion.process.beta_min", "positive", "0.0"]),
        (lambda: VPSDE(beta_max=0.05), ["diffusion.process.beta_max", "0.05"]),
        (lambda: DDPM(num_steps=0), ["diffusion.process.num_steps", "at least 1", "0"]),
        (lambda: DDPM(beta_end=1.0), ["diffusion.process.beta_end", "1.0"]),
        (lambda: Cosine(-0.1), ["diffusion.process.offset", "-0.1"]),
        (lambda: EDM(sigma_max=0.001), ["diffusion.process.sigma_max", "0.001"]),
        (lambda: EDM(sigma_data=0), ["diffusion.process.sigma_data", "positive"]),
        (lambda: DDPM().sampling_times(1001), ["sampling.steps", "1001", "1000"]),
        (lambda: EDM().sampling_times(5, "snr"), ["sampling.spacing", "edm", "'snr'", "karras"]),
        (lambda: VPSDE().sampling_times(5, "tme"), ["sampling.spacing", "did you mean 'time'"]),
    ],
)
def test_errors_name_the_key_the_value_and_the_choices(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", list(PROCESSES))
def test_the_input_of_the_network_is_the_scaled_noisy_image_and_its_time(name):
    process, index = get_process(name), torch.arange(5)
    t = process.time_from_uniform(uniform(0, "time", index))
    x0, noise = normal(0, "x0", index, (1, 2, 2)), normal(0, "noise", index, (1, 2, 2))
    x_t, alpha, sigma = process.diffuse(x0, noise, t)
    x, time = process.network_input(x_t, t)
    for i in range(5):
        a, s, scale = (float(value) for value in (*process.marginal(t[i : i + 1]), process.input_scale(t[i : i + 1])))
        assert (float(alpha[i]), float(sigma[i])) == pytest.approx((a, s), rel=1e-5)
        torch.testing.assert_close(x[i], scale * (a * x0[i] + s * noise[i]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(time, process.network_time(t), check_dtype=False)
    assert (x.dtype, time.dtype) == (torch.float32, torch.int64 if name == "ddpm" else torch.float32)
