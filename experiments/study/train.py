"""One run of the study: a network on CIFAR-10 with scaled skips, the whole training step in one CUDA graph.

    python experiments/study/train.py SPEC.json

The recipe is the paper's: VP-SDE, noise prediction, AdamW with warm-up, EMA; a run may change it (variants.py). Images,
flips, times and noises come from one generator that nothing else uses, so runs of one seed see the same batches whatever
their method. The network computes with bfloat16 copies of float32 master weights, as autocast does, but the copies are made
once per step.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import variants
from evaluator import Evaluator, bin_means, save_grid, save_samples
from network import Spec, build_model, compiled, predict, read_images, read_spec, use_kernels
from torch import Tensor, nn
from weights import Muon, Weights, adamw

from scalelong.data import Batch
from scalelong.diffusion import VPSDE, Objective

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
    "changes": "what a run has beside its method (queue.yaml, variants.py) takes precedence over the above",
    "fid": "10,000 samples from the same starting noises against {} train ({:,}), Inception 2015-12-05, float32",
}


NOISE = Objective(VPSDE())


def training_images(images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    """images[index] in [-1, 1], flipped where uniforms[1] is below a half."""
    x = images[index].float() / 127.5 - 1
    return torch.where((uniforms[1] < 0.5)[:, None, None, None], x.flip(-1), x)


def training_loss(
    model: nn.Module, images: Tensor, index: Tensor, uniforms: Tensor, noise: Tensor,
    objective: Objective = NOISE,
) -> Tensor:  # fmt: skip
    """The mean loss on images[index]; uniforms (2, B) are the times and the flips."""
    x, t = training_images(images, index, uniforms), objective.process.time_from_uniform(uniforms[0])
    return objective.loss(lambda x_t, time: predict(model, x_t, time, low_precision=True), x, noise, t).mean()


class Teacher:
    """The library's extra loss of contrastive self-distillation; the averaged weights teach."""

    def __init__(self, spec: Spec, model: nn.Module, dtype: torch.dtype, on_gpu: bool, device: torch.device) -> None:
        from scalelong.training.distillation import Distillation

        self.model = build_model(spec).to(device).requires_grad_(False)
        self.weights = Weights(self.model, dtype)
        use_kernels(spec, self.model, self.weights)
        settings, process = variants.distillation(spec.changes), variants.objective(spec.changes).process
        self.loss = Distillation(settings, model, self.model, process, spec.seed)
        self.loss.network = compiled(self.model, on_gpu)
        self.samples = torch.arange(spec.batch, device=device)

    def __call__(self, ema: Tensor, images: Tensor, step: Tensor) -> Tensor:
        """The extra loss of a batch whose student has just been run."""
        self.weights.load(ema)
        number = step.long() * len(images) + self.samples
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            return self.loss(Batch(images, None, number, number, number), {})


class Trainer:
    """Trains one network; `advance` runs `steps_per_graph` steps, on a GPU as one CUDA graph."""

    def __init__(self, spec: Spec, images: Tensor, lr: Tensor | None = None) -> None:
        self.spec, self.images, device = spec, images, images.device
        self.lr = spec.lr if lr is None else lr  # a tensor can be changed between the replays of a graph
        self.on_gpu = device.type == "cuda"
        self.model = build_model(spec).to(device)
        self.weights = Weights(self.model, torch.bfloat16 if self.on_gpu else torch.float32)
        self.start = self.weights.master.clone()
        self.ema, self.short, self.m, self.v = (torch.zeros_like(self.start) for _ in range(4))
        self.sizes: Sequence[float | Tensor] = (1.0, 1.0)
        if "rate" in spec.changes or "mup" in spec.changes:
            sizes = variants.step_sizes(self.model, self.weights.parameters, spec.changes)
            self.sizes = self.weights.flatten(sizes)  # of parameters: before the kernels join them to leaves
        self.muon = Muon(self.model, self.weights) if spec.changes.get("muon") else None
        if self.muon:
            self.sizes = (self.muon.sizes, 1.0)
        use_kernels(spec, self.model, self.weights)
        self.teacher = None
        if "distill" in spec.changes:
            self.teacher = Teacher(spec, self.model, self.weights.low.dtype, self.on_gpu, device)
        self.step, self.loss_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        self.generator = torch.Generator(device)
        self.index = torch.zeros(spec.batch, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(2, spec.batch, device=device)
        self.noise = torch.zeros(spec.batch, *images.shape[1:], device=device)
        objective = variants.objective(spec.changes)
        self._loss = compiled(lambda *given: training_loss(*given, objective), self.on_gpu)
        self._adamw = compiled(adamw, self.on_gpu)
        self.advance = self._capture() if self.on_gpu else self._steps
        self.reset()

    def _one_step(self) -> None:
        self.index.random_(0, len(self.images), generator=self.generator)
        self.uniforms.uniform_(generator=self.generator)
        self.noise.normal_(generator=self.generator)
        variants.set_progress(self.model, self.spec.changes, self.step)
        loss = self._loss(self.model, self.images, self.index, self.uniforms, self.noise)
        total = loss
        if self.teacher:
            total = loss + self.teacher(self.ema, training_images(self.images, self.index, self.uniforms), self.step)
        gradients = torch.autograd.grad(total, self.weights.leaves, materialize_grads=True)
        with torch.no_grad():
            self.step += 1
            self.loss_sum += loss.detach()
            w, split = self.weights, len(self.weights.low)
            flat = w.flatten(gradients)
            if self.muon:
                self.muon.step(flat[0])
            updates = (self.muon.update if self.muon else 0.0, 0.0)
            for part, low, gradient, sizes, update in zip(
                (slice(split), slice(split, None)), (w.low, w.low[:0]), flat, self.sizes, updates, strict=True
            ):
                state = (w.master[part], low, gradient, self.m[part], self.v[part], self.ema[part], self.short[part])
                self._adamw(*state, self.step, self.lr, self.spec.warmup, sizes, update)

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

    def reset(self) -> None:
        """Go back to the start: its weights, and the seed's first batch."""
        self.weights.load(self.start)
        self.ema.copy_(self.start)
        self.short.copy_(self.start)
        for state in (self.m, self.v, self.step, self.loss_sum):
            state.zero_()
        if self.muon:
            self.muon.reset()
        self.generator.manual_seed(self.spec.seed)

    def batch_hash(self) -> str:
        """A digest of the last batch's images, flips, times and noises: equal for all runs of one seed at one step."""
        digest = hashlib.sha256()
        for part in (self.index, self.uniforms, self.noise):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


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
                short = [(f"{spec.name}~short", trainer.short)] if spec.short_fid else []
                for name, weights in (*short, (spec.name, trainer.ema)):
                    evaluator.weights.load(weights)
                    pixels = evaluator.samples()
                    save_samples(folder / "samples" / f"{name}@{step}.npy", pixels)
                save_grid(folder / f"{spec.name}.png", pixels[:64])
        evaluator.weights.load(trainer.ema)
        torch.save(evaluator.model.state_dict(), folder / f"{spec.name}.pt")
        write(event="end", reason=end, step=step)
    return end


def main() -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(train(read_spec(Path(sys.argv[1])), device))


if __name__ == "__main__":
    main()
