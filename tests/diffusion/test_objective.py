import pytest
import torch

from scalelong.diffusion import DDPM, EDM, VPSDE, Cosine, Flow, Objective, draw_time_and_noise
from scalelong.random import normal, uniform
from tests.diffusion.gaussian_oracle import COVARIANCE, MEAN, SHAPE, VARIANCES, BestNetwork, cubature, flat, image

OBJECTIVES = [Objective(process, p) for process in (VPSDE(), Cosine(), DDPM()) for p in ("noise", "x0", "v")]
OBJECTIVES += [Objective(EDM()), Objective(EDM(sigma_data=0.8)), Objective(Flow())]
TIMES = {"vp": [0.01, 0.2, 0.5, 0.9], "cosine": [0.01, 0.3, 0.9], "ddpm": [3, 200, 700], "edm": [0.01, 0.3, 2.0, 60.0]}
TIMES["flow"] = [0.01, 0.3, 0.9]


def label(objective):
    return f"{objective.process!r}-{objective.prediction}"


every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=label)


def target_of(objective, x0, noise, alpha, sigma):
    """The definition of each prediction, from the papers."""
    if objective.prediction == "edm":
        data = objective.process.sigma_data
        c_skip, c_out = data**2 / (sigma**2 + data**2), sigma * data / (sigma**2 + data**2) ** 0.5
        return (x0 - c_skip * (x0 + sigma * noise)) / c_out
    targets = {"noise": noise, "x0": x0, "v": alpha * noise - sigma * x0, "flow": noise - x0}
    return targets[objective.prediction]


def gaussian_points():
    """16 pairs (x_0, noise) over which the average of a quadratic is its expectation."""
    z = cubature(8)
    return image(MEAN + z[:, :4] @ torch.linalg.cholesky(COVARIANCE).T), image(z[:, 4:])


def expected_loss(objective, net, t):
    x0, noise = gaussian_points()
    return objective.loss(net, x0, noise, torch.full((16,), t)).double().mean().item()


@every_objective
def test_expected_loss_of_the_best_network_is_the_analytic_one(objective):
    """The variance of the target given x_t, averaged over the modes; for EDM lambda(sigma) times the variance of x_0."""
    for t in TIMES[objective.process.name]:
        alpha, sigma = objective.process.marginal(torch.tensor(t).double())
        of_x0 = (
            VARIANCES * sigma**2 / (alpha**2 * VARIANCES + sigma**2)
        )  # Var(x_0 | x_t); eps = (x_t - alpha x_0) / sigma
        want = of_x0.mean()
        if objective.prediction == "noise":
            want = want * (alpha / sigma) ** 2
        elif objective.prediction == "v":
            want = want * (alpha**2 / sigma + sigma) ** 2
        elif objective.prediction == "flow":  # eps - x_0 = (x_t - x_0) / sigma
            want = want / sigma**2
        elif objective.prediction == "edm":
            data = objective.process.sigma_data
            want = want * (sigma**2 + data**2) / (sigma * data) ** 2
        assert expected_loss(objective, BestNetwork(objective), t) == pytest.approx(want.item(), rel=1e-4)


@every_objective
def test_every_change_to_the_best_network_raises_the_loss(objective):
    """Its error is orthogonal to every function of x_t, so a change adds exactly its own mean square."""
    best = BestNetwork(objective)
    for t in TIMES[objective.process.name]:
        least = expected_loss(objective, best, t)
        for shift in (-0.3, 0.3):
            shifted = expected_loss(objective, lambda x, time, s=shift: best(x, time) + s, t)
            assert shifted - least == pytest.approx(0.09, rel=1e-3)
        x0, noise = gaussian_points()
        alpha, sigma = objective.process.marginal(torch.tensor(t))
        square = (alpha * x0 + sigma * noise).square().mean() * objective.process.input_scale(torch.tensor(t)) ** 2
        for slope in (-0.2, 0.2):
            tilted = expected_loss(objective, lambda x, time, s=slope: best(x, time) + s * x, t)
            assert tilted - least == pytest.approx(0.04 * square.item(), rel=1e-3)


@every_objective
def test_denoise_inverts_the_definition_of_the_target(objective):
    index = torch.arange(64)
    t, noise = draw_time_and_noise(objective.process, 1, index, SHAPE)
    if objective.process.name != "ddpm":
        t = t.clamp(0.01, 0.98)
    x0 = normal(2, "image", index, SHAPE)
    alpha, sigma = (v[:, None, None, None] for v in objective.process.marginal(t))
    answer = target_of(objective, x0, noise, alpha, sigma)
    got_x0, got_noise = objective.denoise(lambda x, time: answer, alpha * x0 + sigma * noise, t)
    torch.testing.assert_close(got_x0, x0, rtol=0, atol=3e-4)
    torch.testing.assert_close(got_noise, noise, rtol=0, atol=3e-4)
    torch.testing.assert_close(objective.loss(lambda x, time: answer, x0, noise, t), torch.zeros(64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("process", [VPSDE(), Cosine(), DDPM()], ids=repr)
def test_noise_x0_and_v_say_the_same(process):
    index = torch.arange(32)
    x = normal(3, "image", index, SHAPE)
    t, _ = draw_time_and_noise(process, 4, index, SHAPE)
    if process.name != "ddpm":
        t = t.clamp(0.01, 0.98)
    guesses = [Objective(process, p).denoise(BestNetwork(Objective(process, p)), x, t) for p in ("noise", "x0", "v")]
    for x0, noise in guesses[1:]:
        torch.testing.assert_close(x0, guesses[0][0], rtol=0, atol=1e-4)
        torch.testing.assert_close(noise, guesses[0][1], rtol=0, atol=1e-4)
    for x0, noise in guesses:
        alpha, sigma = process.marginal(t)
        again = alpha[:, None] * flat(x0) + sigma[:, None] * flat(noise)
        torch.testing.assert_close(again, flat(x), rtol=0, atol=1e-5)


@every_objective
def test_the_loss_is_per_sample(objective):
    index = torch.arange(6)
    t, noise = draw_time_and_noise(objective.process, 5, index, SHAPE)
    x0, net = normal(6, "image", index, SHAPE), lambda x, time: x.tanh() + time.view(-1, 1, 1, 1) / 1000
    together = objective.loss(net, x0, noise, t)
    apart = torch.cat([objective.loss(net, x0[i : i + 1], noise[i : i + 1], t[i : i + 1]) for i in range(6)])
    assert together.shape == (6,) and together.std() > 0
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)


class Spy:
    """Remembers what it was fed and answers in some precision."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, x, time, **condition):
        self.x, self.time, self.condition = x, time, condition
        return torch.full_like(x, 1.0078125).to(self.dtype)  # 1 + 2^-7 is exact in bfloat16; differences to it are not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_schedule_and_loss_are_float32_whatever_comes_in(dtype):
    index = torch.arange(4)
    for objective in OBJECTIVES:
        t, noise = draw_time_and_noise(objective.process, 7, index, SHAPE)
        x0, spy = normal(8, "image", index, SHAPE).bfloat16(), Spy(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = objective.loss(spy, x0.to(dtype), noise, t, label=3)
            x0_hat, noise_hat = objective.denoise(Spy(dtype), x0.to(dtype), t)
        assert x0_hat.dtype == noise_hat.dtype == torch.float32
        alpha, sigma = (v.double()[:, None, None, None] for v in objective.process.marginal(t))
        x_t = alpha * x0.double() + sigma * noise.double()
        scale = objective.process.input_scale(t).double()[:, None, None, None]
        assert spy.x.dtype == torch.float32 and loss.dtype == torch.float32 and spy.condition == {"label": 3}
        torch.testing.assert_close(spy.x.double(), scale * x_t, rtol=1e-5, atol=1e-5)
        want = (1.0078125 - target_of(objective, x0.double(), noise.double(), alpha, sigma)).square().flatten(1).mean(1)
        torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-5)
        assert torch.equal(spy.time, objective.process.network_time(t))
        assert spy.time.dtype == (torch.int64 if objective.process.name == "ddpm" else torch.float32)


def test_gradients_reach_the_network():
    weight = torch.tensor(0.3, requires_grad=True)
    objective, index = Objective(VPSDE()), torch.arange(8)
    t, noise = draw_time_and_noise(objective.process, 1, index, SHAPE)
    x0 = normal(2, "image", index, SHAPE)
    objective.loss(lambda x, time: weight * x, x0, noise, t).mean().backward()
    alpha, sigma = (v[:, None, None, None] for v in objective.process.marginal(t))
    x_t = alpha * x0 + sigma * noise
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, (2 * x_t * (0.3 * x_t - noise)).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_denoising_a_clean_image_gives_it_back(prediction):
    x, t = normal(1, "image", torch.arange(4), SHAPE), torch.zeros(4)
    net = {"noise": torch.zeros_like, "v": torch.zeros_like, "x0": lambda x: x}[prediction]
    x0, noise = Objective(VPSDE(), prediction).denoise(lambda x, time: net(x), x, t)
    torch.testing.assert_close(x0, x, rtol=1e-6, atol=0)
    assert torch.isfinite(noise).all()


def test_time_and_noise_are_a_function_of_seed_and_index():
    process, index = VPSDE(), torch.tensor([5, 900, 17, 3_000_000_000])
    t, noise = draw_time_and_noise(process, 3, index, SHAPE)
    for i in range(4):
        t_alone, noise_alone = draw_time_and_noise(process, 3, index[i : i + 1], SHAPE)
        assert t_alone.item() == t[i].item()
        torch.testing.assert_close(noise_alone[0], noise[i], rtol=0, atol=1e-6)
    assert torch.equal(t, uniform(3, "time", index).float()) and torch.equal(noise, normal(3, "noise", index, SHAPE))
    assert not torch.isin(draw_time_and_noise(process, 4, index, SHAPE)[0], t).any()


@pytest.mark.parametrize("process", [VPSDE(), DDPM(), EDM()], ids=repr)
def test_drawn_times_follow_the_process_and_not_the_noise(process):
    t, noise = draw_time_and_noise(process, 0, torch.arange(20_000), (8,))
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn, wanted = t.double().sort().values, process.time_from_uniform(u).double()
    if process.name == "edm":
        drawn, wanted = drawn.log(), wanted.log()
    gap = (drawn - wanted)[200:-200].abs()  # 1% cut off at each end
    assert gap.max() < {"vp": 0.015, "ddpm": 15.0, "edm": 0.13}[process.name]  # 4 standard errors of a quantile
    rank = t.double().argsort().argsort().double()
    correlation = torch.corrcoef(torch.cat([rank[None], noise.T.double()]))[0, 1:]
    assert correlation.abs().max() < 0.03  # 4 standard errors


def test_the_default_prediction():
    assert Objective(VPSDE()).prediction == Objective(DDPM()).prediction == "noise"
    assert Objective(EDM()) == Objective(EDM(), "edm")


@pytest.mark.parametrize(
    ("process", "prediction", "words"),
    [
        (VPSDE(), "nois", ["diffusion.prediction", "'nois'", "did you mean 'noise'", "noise, x0, v"]),
        (VPSDE(), "edm", ["diffusion.prediction", "vp", "'edm'"]),
        (EDM(), "v", ["diffusion.prediction", "edm", "'v'", "choose one of edm"]),
    ],
)
def test_a_prediction_the_process_has_not_is_refused(process, prediction, words):
    with pytest.raises(ValueError) as caught:
        Objective(process, prediction)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_min_snr_weights_are_those_of_its_paper(prediction):
    """Hang et al. 2023, Sec. 3.4: min(SNR, 5) / SNR for the noise, min(SNR, 5) for x_0, min(SNR, 5) / (SNR + 1) for v."""
    weighted, plain = Objective(VPSDE(), prediction, min_snr_gamma=5.0), Objective(VPSDE(), prediction)
    t = torch.linspace(0.01, 0.99, 16)
    x0, noise = gaussian_points()
    alpha, sigma = VPSDE().marginal(t.double())
    snr = (alpha / sigma).square()
    assert snr.min() < 5 < snr.max()
    want = snr.clamp(max=5) / {"noise": snr, "x0": torch.ones_like(snr), "v": snr + 1}[prediction]
    both = [each.loss(lambda x, time: 0.3 * x, x0, noise, t).double() for each in (weighted, plain)]
    torch.testing.assert_close(both[0], both[1] * want, rtol=1e-4, atol=0)
