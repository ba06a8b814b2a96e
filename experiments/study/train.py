"""One run of the study: a small U-ViT on CIFAR-10 with scaled skips, the whole training step in one CUDA graph.

    python experiments/study/train.py SPEC.json

The recipe is the paper's: VP-SDE, noise prediction, AdamW with warm-up, EMA. Images, flips, times and noises come from
one generator that nothing else uses, so runs of one seed see the same batches whatever their method. The network computes
with bfloat16 copies of float32 master weights, as autocast does, but the copies are made once per step.

Shapes: B batch, n images; images are uint8 (n, 3, 32, 32).
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import variants
from PIL import Image
from torch import Tensor, nn

import scalelong
from scalelong.backbones import UViT, UViTConfig

BETA_MIN, BETA_MAX = 0.1, 20.0
BETAS, EPS, WEIGHT_DECAY = (0.99, 0.999), 1e-8, 0.03
EMA_DECAY, SHORT_DECAY = 0.9999, 0.999
SAMPLER_STEPS, LAST_TIME = 50, 1e-3
FIXED_SEED = 20231  # test noises and starting noises, the same for every run of every piece
NOISE_BINS = 10

PROTOCOL = {
    "process": "VP-SDE, beta(t) = 0.1 + 19.9 t, noise prediction, mean squared error, t uniform, network time 999 t",
    "optimizer": "AdamW, betas (0.99, 0.999), weight decay 0.03 on all parameters, linear warm-up, constant rate",
    "ema": "decay min(0.9999, (1 + s) / (10 + s)) after step s",
    "short_ema": "decay min(0.999, (1 + s) / (10 + s)): short_test_loss and fid_short, else as test_loss and fid",
    "data": "{} train, images drawn with replacement, random horizontal flip",
    "precision": "bfloat16 autocast, float32 master weights, AdamW state and EMA",
    "test_loss": "EMA weights, float32 (TF32 products), first test images, t = (i + 0.5) / n, one fixed noise per image",
    "sampler": "DPM-Solver++(2M), 50 steps even in log-SNR from t = 1 to 0.001, x0 clamped to [-1, 1], EMA weights, float32 "
    "(TF32 products)",
    "fid": "10,000 samples from the same starting noises against {} train ({:,}), Inception 2015-12-05, float32",
}


@dataclass(frozen=True)
class Spec:
    """What a worker is given."""

    name: str
    method: str
    seed: int
    folder: str  # NAME.jsonl, NAME.png and samples/ are written here
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # see variants.py
    data: str = ""  # .npz with uint8 arrays train and test; empty: random images, to measure speed
    steps: int = 100_000
    batch: int = 128
    lr: float = 2e-4
    warmup: int = 2500
    dim: int = 256
    depth: int = 12
    heads: int = 4
    patch: int = 4
    loss_every: int = 1000
    fid_at: tuple[int, ...] = ()
    train_images: int = 50_000  # of random data
    test_images: int = 4000
    num_samples: int = 10_000
    eval_batch: int = 1000
    steps_per_graph: int = 5
    kernels: bool = True  # use the Triton kernels on a GPU
    deadline: float = math.inf  # Unix time at which training stops, wherever it is


# ------------------------------------------------------------------------------------------------------------ diffusion


def marginal(t: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) of the VP-SDE, (B, 1, 1, 1)."""
    log_alpha = (-0.25 * (BETA_MAX - BETA_MIN) * t.square() - 0.5 * BETA_MIN * t)[:, None, None, None]
    return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()


def predict_noise(model: nn.Module, x_t: Tensor, t: Tensor, low_precision: bool = False) -> Tensor:
    """The network's prediction in float32."""
    with torch.autocast(x_t.device.type, torch.bfloat16, enabled=low_precision and x_t.is_cuda):
        return model(x_t, 999.0 * t).float()


def training_loss(model: nn.Module, images: Tensor, index: Tensor, uniforms: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error on images[index]; uniforms (2, B) are the times and the flips."""
    t, flip = uniforms[0], uniforms[1] < 0.5
    x = images[index].float() / 127.5 - 1
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    alpha, sigma = marginal(t)
    return (predict_noise(model, alpha * x + sigma * noise, t, low_precision=True) - noise).square().mean()


def sampling_times(steps: int) -> Tensor:
    """(steps,) float64 times from 1 to LAST_TIME, even in log(alpha / sigma)."""
    alpha, sigma = (v.flatten() for v in marginal(torch.tensor([1.0, LAST_TIME], dtype=torch.float64)))
    ends = (alpha / sigma).log()
    log_snr = torch.linspace(float(ends[0]), float(ends[1]), steps, dtype=torch.float64)
    area = 2 * (BETA_MAX - BETA_MIN) * torch.nn.functional.softplus(-2 * log_snr)
    return area / ((BETA_MIN**2 + area).sqrt() + BETA_MIN) / (BETA_MAX - BETA_MIN)


def sample(predict: Callable[[Tensor, Tensor], Tensor], x: Tensor, steps: int = SAMPLER_STEPS) -> Tensor:
    """DPM-Solver++(2M) from noise x (B, 3, H, W) to images in [-1, 1]; the last step goes to the clean image."""
    times = sampling_times(steps)
    alpha, sigma = (v.flatten().tolist() for v in marginal(times))
    log_snr = [math.log(a / s) for a, s in zip(alpha, sigma, strict=True)]
    previous, last_h = x, 0.0
    for i, t in enumerate(times.tolist()):
        x0 = ((x - sigma[i] * predict(x, torch.full((len(x),), t, device=x.device))) / alpha[i]).clamp(-1, 1)
        if i + 1 == steps:
            return x0
        h = log_snr[i + 1] - log_snr[i]
        direction = x0 if i == 0 else x0 + (x0 - previous) * (h / last_h / 2)
        x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * math.expm1(-h) * direction
        previous, last_h = x0, h
    return x


def to_uint8(images: Tensor) -> Tensor:
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# ------------------------------------------------------------------------------------------------- weights and optimizer


class Weights:
    """A network's parameters in two flat tensors: float32 `master`, and `low`, what matrix products and convolutions use.

    Parameters become views: of `low` in linear layers and convolutions, of `master` everywhere else.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        kinds = (nn.Linear, nn.Conv2d)
        products = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
        self.parameters = sorted(model.parameters(), key=lambda p: id(p) not in products)
        sizes = [-(-p.numel() // 64) * 64 for p in self.parameters]  # every tensor starts at an aligned address
        device = self.parameters[0].device
        self.master = torch.zeros(sum(sizes), device=device)
        low_size = sum(s for p, s in zip(self.parameters, sizes, strict=True) if id(p) in products)
        self.low = torch.zeros(low_size, dtype=dtype, device=device)
        self.padding, start = [], 0
        for parameter, size in zip(self.parameters, sizes, strict=True):
            place = slice(start, start + parameter.numel())
            self.master[place].copy_(parameter.detach().flatten())
            used = self.low if id(parameter) in products else self.master
            parameter.data = used[place].view(parameter.shape)
            self.padding.append(used.new_zeros(size - parameter.numel()))
            start += size
        self.load(self.master.clone())

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Set all parameters from a flat float32 tensor."""
        self.master.copy_(values)
        self.low.copy_(self.master[: len(self.low)])

    def flatten(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of all parameters as two flat tensors: those of `low`, in its dtype, and the rest."""
        flat: dict[bool, list[Tensor]] = {True: [], False: []}
        count = 0
        for gradient, padding in zip(gradients, self.padding, strict=True):
            flat[count < len(self.low)] += [gradient.reshape(-1), padding]
            count += gradient.numel() + padding.numel()
        return torch.cat(flat[True]), torch.cat(flat[False])


def adamw(master, low, gradient, m, v, ema, short, step, lr, warmup, sizes=1.0):
    """AdamW on flat tensors, both EMAs and the low-precision copy: one pass over memory once compiled.

    sizes: what Adam's step of each weight is multiplied by.
    """
    gradient = gradient.float()
    rate = lr * (step / warmup).clamp(max=1.0)
    m.lerp_(gradient, 1 - BETAS[0])
    v.lerp_(gradient.square(), 1 - BETAS[1])
    m_hat = m / -torch.expm1(step * math.log(BETAS[0]))
    v_hat = v / -torch.expm1(step * math.log(BETAS[1]))
    master.copy_(master * (1 - rate * WEIGHT_DECAY) - rate * sizes * m_hat / (v_hat.sqrt() + EPS))
    ema.lerp_(master, 1 - ((1 + step) / (10 + step)).clamp(max=EMA_DECAY))
    short.lerp_(master, 1 - ((1 + step) / (10 + step)).clamp(max=SHORT_DECAY))
    low.copy_(master[: len(low)])


# ------------------------------------------------------------------------------------------------------------- training


def build_model(spec: Spec) -> nn.Module:
    """The scaled network; the weights outside the gates depend on the seed alone."""
    torch.manual_seed(spec.seed)
    config = UViTConfig(image_size=32, patch_size=spec.patch, dim=spec.dim, depth=spec.depth, heads=spec.heads)
    model = UViT(config)
    scalelong.apply(model, spec.method, **spec.options)
    variants.change(model, spec.changes)
    return model


class Trainer:
    """Trains one network; `advance` runs `steps_per_graph` steps, on a GPU as one CUDA graph."""

    def __init__(self, spec: Spec, images: Tensor) -> None:
        self.spec, self.images, device = spec, images, images.device
        self.on_gpu = device.type == "cuda"
        self.model = build_model(spec).to(device)
        if self.on_gpu and spec.kernels:
            from fast_uvit import speed_up

            speed_up(self.model)
        self.weights = Weights(self.model, torch.bfloat16 if self.on_gpu else torch.float32)
        self.start = self.weights.master.clone()
        self.ema, self.short, self.m, self.v = (torch.zeros_like(self.start) for _ in range(4))
        self.sizes: Sequence[float | Tensor] = (1.0, 1.0)
        if "rate" in spec.changes:
            sizes = variants.step_sizes(self.model, self.weights.parameters, spec.changes["rate"])
            self.sizes = self.weights.flatten(sizes)
        self.step, self.loss_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        self.generator = torch.Generator(device)
        self.index = torch.zeros(spec.batch, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(2, spec.batch, device=device)
        self.noise = torch.zeros(spec.batch, *images.shape[1:], device=device)
        self._loss = compiled(training_loss, self.on_gpu)
        self._adamw = compiled(adamw, self.on_gpu)
        self.advance = self._capture() if self.on_gpu else self._steps
        self._reset()

    def _one_step(self) -> None:
        self.index.random_(0, len(self.images), generator=self.generator)
        self.uniforms.uniform_(generator=self.generator)
        self.noise.normal_(generator=self.generator)
        variants.set_progress(self.model, self.spec.changes, self.step)
        loss = self._loss(self.model, self.images, self.index, self.uniforms, self.noise)
        gradients = torch.autograd.grad(loss, self.weights.parameters, materialize_grads=True)
        with torch.no_grad():
            self.step += 1
            self.loss_sum += loss.detach()
            w, split = self.weights, len(self.weights.low)
            for part, low, gradient, sizes in zip(
                (slice(split), slice(split, None)), (w.low, w.low[:0]), w.flatten(gradients), self.sizes, strict=True
            ):
                state = (w.master[part], low, gradient, self.m[part], self.v[part], self.ema[part], self.short[part])
                self._adamw(*state, self.step, self.spec.lr, self.spec.warmup, sizes)

    def _steps(self) -> None:
        for _ in range(self.spec.steps_per_graph):
            self._one_step()

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=stream):
            self._steps()
        self._graph = graph
        return graph.replay

    def _reset(self) -> None:
        """Forget the steps that warmed up the graph."""
        self.weights.load(self.start)
        self.ema.copy_(self.start)
        self.short.copy_(self.start)
        for state in (self.m, self.v, self.step, self.loss_sum):
            state.zero_()
        self.generator.manual_seed(self.spec.seed)

    def batch_hash(self) -> str:
        """A digest of the last batch's images, flips, times and noises: equal for all runs of one seed at one step."""
        digest = hashlib.sha256()
        for part in (self.index, self.uniforms, self.noise):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


class Evaluator:
    """Loss and samples of given weights, with a plain network of its own in float32.

    Methods differ by 1e-4 in the loss: rounding to bfloat16 must not add to that.
    """

    def __init__(self, spec: Spec, test: Tensor) -> None:
        self.spec, device = spec, test.device
        self.model = build_model(spec).to(device).requires_grad_(False)
        self.weights = Weights(self.model, torch.float32)
        generator = torch.Generator(device).manual_seed(FIXED_SEED)
        self.noise = torch.randn(test.shape, device=device, generator=generator)
        self.t = (torch.arange(len(test), device=device) + 0.5) / len(test)
        alpha, sigma = marginal(self.t)
        self.x_t = alpha * (test.float() / 127.5 - 1) + sigma * self.noise
        self._predict = compiled(predict_noise, device.type == "cuda")

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self._predict(self.model, x, t)

    def losses(self) -> tuple[Tensor, list[float]]:
        """(n,) loss per test image, and the mean coefficient of each skip."""
        losses, kappas = [], []
        size = self.spec.eval_batch
        for x, t, noise in zip(self.x_t.split(size), self.t.split(size), self.noise.split(size), strict=True):
            losses.append((self.predict(x, t) - noise).square().flatten(1).mean(1))
            kappas.append(torch.tensor(scalelong.coefficients(self.model), dtype=torch.float64))
        return torch.cat(losses), torch.stack(kappas).mean(0).tolist()

    def samples(self) -> Tensor:
        """uint8 (num_samples, 3, 32, 32), each a function of the weights and its index alone."""
        device, shape, made = self.x_t.device, self.x_t.shape[1:], []
        for start in range(0, self.spec.num_samples, self.spec.eval_batch):
            generator = torch.Generator(device).manual_seed(FIXED_SEED + 1 + start)
            x = torch.randn(self.spec.eval_batch, *shape, device=device, generator=generator)
            made.append(to_uint8(sample(self.predict, x)).cpu())
        return torch.cat(made)[: self.spec.num_samples]


def bin_means(losses: Tensor) -> list[float]:
    """The mean loss in equal bins of t."""
    return [round(float(part.mean()), 7) for part in losses.chunk(NOISE_BINS)]


def compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False) if on_gpu else function


def train(spec: Spec, device: torch.device) -> str:
    """Train to the last step, the deadline, divergence or until NAME.stop appears, and say which.

    Rows go to NAME.jsonl as they are measured.
    """
    folder = Path(spec.folder)
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    stop = folder / f"{spec.name}.stop"
    begun = time.time()
    images, test = (part.to(device) for part in read_images(spec))
    trainer = Trainer(spec, images)
    evaluator = Evaluator(spec, test)
    evaluator.losses()  # compiles
    ready = time.time()
    with (folder / f"{spec.name}.jsonl").open("w") as log:

        def write(**row: Any) -> None:
            log.write(json.dumps(row) + "\n")
            log.flush()

        write(
            event="start",
            setup_seconds=round(ready - begun, 1),
            parameters=sum(map(torch.numel, trainer.weights.parameters)),
        )
        end, step, counted = "", 0, 0
        while not end:
            trainer.advance()
            step += spec.steps_per_graph
            if step % (spec.steps_per_graph * 40) == 0 and trainer.on_gpu:
                torch.cuda.synchronize()  # replays are queued: without this the clock runs ahead of the GPU
            if step >= spec.steps:
                end = "complete"
            elif time.time() > spec.deadline:
                end = "deadline"
            elif step % (spec.steps_per_graph * 40) == 0 and stop.exists():
                end = "stopped"
            if step % spec.loss_every and step not in spec.fid_at and not end:
                continue
            train_loss = float(trainer.loss_sum) / (step - counted)
            trainer.loss_sum.zero_()
            counted = step
            seconds = time.time() - ready
            variants.set_progress(evaluator.model, spec.changes, trainer.step)
            evaluator.weights.load(trainer.weights.master)
            raw_losses, _ = evaluator.losses()
            evaluator.weights.load(trainer.short)
            short_losses, _ = evaluator.losses()
            evaluator.weights.load(trainer.ema)
            losses, kappas = evaluator.losses()
            test_loss = float(losses.mean())
            if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
                end = "diverged"
            write(
                step=step,
                test_loss=test_loss,
                train_loss=train_loss,
                seconds=round(seconds, 2),
                bins=bin_means(losses),
                raw_bins=bin_means(raw_losses),  # of the weights themselves
                short_bins=bin_means(short_losses),
                coefficients=[round(kappa, 5) for kappa in kappas],
                batch=trainer.batch_hash(),
            )
            if end != "diverged" and spec.num_samples and (step in spec.fid_at or end):
                for name, weights in ((f"{spec.name}~short", trainer.short), (spec.name, trainer.ema)):
                    evaluator.weights.load(weights)
                    pixels = evaluator.samples()
                    save_samples(folder / "samples" / f"{name}@{step}.npy", pixels)
                save_grid(folder / f"{spec.name}.png", pixels[:64])
        evaluator.weights.load(trainer.ema)
        torch.save(evaluator.model.state_dict(), folder / f"{spec.name}.pt")
        write(event="end", reason=end, step=step)
    return end


def read_images(spec: Spec) -> tuple[Tensor, Tensor]:
    """uint8 train and test images; random ones where no data is given."""
    if not spec.data:
        made = torch.randint(0, 256, (spec.train_images + spec.test_images, 3, 32, 32), dtype=torch.uint8)
        return made[: spec.train_images], made[spec.train_images :]
    with np.load(spec.data) as arrays:
        return torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["test"][: spec.test_images])


def save_samples(path: Path, pixels: Tensor) -> None:
    """Write them whole or not at all: the FID process picks them up."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, pixels.numpy())
    partial.replace(path)


def save_grid(path: Path, pixels: Tensor, columns: int = 8) -> None:
    rows = [torch.cat(list(row), dim=2) for row in pixels.split(columns) if len(row) == columns]
    if rows:
        Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).numpy()).save(path)


def write_spec(spec: Spec, path: Path) -> None:
    path.write_text(json.dumps(asdict(spec)))


def read_spec(path: Path) -> Spec:
    content = json.loads(path.read_text())
    return Spec(**{**content, "fid_at": tuple(content["fid_at"])})


def main() -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(train(read_spec(Path(sys.argv[1])), device))


if __name__ == "__main__":
    main()
