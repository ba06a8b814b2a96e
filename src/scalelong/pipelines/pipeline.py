"""Pipeline for unconditional, class- and text-conditional diffusion of pixels or latents.

Exported folders contain this file, prefixed by the processes and samplers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from scalelong.diffusion.objective import Objective
from scalelong.diffusion.process import get_process
from scalelong.diffusion.sampling import Start, guided, sample
from scalelong.runs.settings import SamplingSettings

Tensors = dict[str, Any]


class ScaleLongPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Pipeline for any denoiser with the signature of diffusers' UNets; unused components are None.

    Samples like the exported run, or with `scheduler` if set.
    """

    _optional_components = ["scheduler", "vae", "text_encoder", "tokenizer"]  # noqa: RUF012
    model_cpu_offload_seq = "text_encoder->unet->vae"

    def __init__(
        self,
        unet: Any,
        scheduler: Any = None,
        vae: Any = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        num_classes: int = 0,
        null_class: bool = False,
        class_names: Any = (),
        text_tokens: int = 0,
        null_text: bool = False,
        latent_scale: float = 1.0,
        latent_shift: float = 0.0,
        process: str = "vp",
        prediction: str = "",
        sampler: str = "",
        clip: bool = False,
        default_steps: int = 50,
        default_guidance: float = 1.0,
        guidance_interval: Any = (0.0, None),  # lowest and highest sigma / alpha; None: no bound
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(num_classes=num_classes, null_class=null_class, class_names=list(class_names))
        self.register_to_config(text_tokens=text_tokens, null_text=null_text)
        self.register_to_config(process=process, prediction=prediction, sampler=sampler, clip=clip)
        self.register_to_config(latent_scale=latent_scale, latent_shift=latent_shift, default_steps=default_steps)
        self.register_to_config(default_guidance=default_guidance, guidance_interval=list(guidance_interval))

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | str | Sequence[int | str] | Tensor | None = None,
        guidance_scale: float | None = None,
        num_inference_steps: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        seed: int | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Sample images.

        seed: reproduce the first images of `scalelong sample --seed`, independent of the batch size.
        latents: initial N(0, 1) noise.
        output_type: pil, np, pt (in [0, 1]) or latent.
        """
        batch_size = batch_size if latents is None else len(latents)
        condition, null, batch_size = self._condition(prompt, class_labels, batch_size)
        scale = self.config.default_guidance if guidance_scale is None else guidance_scale
        if scale != 1 and null is None:
            raise ValueError(f"guidance_scale: {scale}, but this model has no null condition; leave it at 1")
        shape = (self.unet.config.in_channels, *(self.unet.config.sample_size,) * 2)
        device = self._execution_device

        def noise(_step: int = 0) -> Tensor:
            drawn: Tensor = randn_tensor((batch_size, *shape), generator, device, torch.float32)
            return drawn

        start: Tensor | Start
        if seed is not None:
            start = (seed, torch.arange(batch_size, device=device), shape)
        else:
            start = noise() if latents is None else latents.to(device, torch.float32)
        steps = num_inference_steps or self.config.default_steps
        low, high = self.config.guidance_interval
        interval = (low or 0.0, math.inf if high is None else high)
        if self.scheduler is not None:
            x = start if isinstance(start, Tensor) else noise()
            x = self._solve(x, steps, condition, null or {}, scale, interval, generator)
        else:
            clip, name = self.config.clip, self.config.sampler
            settings = SamplingSettings(name, steps, clip=clip, guidance=scale, guidance_interval=interval)
            objective = Objective(get_process(self.config.process), self.config.prediction)
            with self.progress_bar(total=steps * (2 if name == "heun" else 1)) as bar:

                def net(*args: Any, **given: Any) -> Tensor:
                    bar.update()
                    return self._network(*args, **given)

                step_noise = None if seed is not None else noise
                x = sample(objective, net, start, settings, null=null, step_noise=step_noise, **condition)
        return self._finish(x, output_type, return_dict)

    def _network(self, x: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
        output: Tensor = self.unet(x.to(self.unet.dtype), time, **condition, return_dict=False)[0]
        return output.float()

    def _solve(
        self, x: Tensor, steps: int, condition: Tensors, null: Tensors, scale: float, interval: Any, generator: Any
    ) -> Tensor:
        """Sample with `self.scheduler`."""
        self.scheduler.set_timesteps(steps, device=x.device)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)  # else schedulers look up the first timestep, which need not be unique
        x = x * self.scheduler.init_noise_sigma
        options = {"generator": generator, "use_clipped_model_output": True}  # where the scheduler has them
        options = {name: options[name] for name in options if name in inspect.signature(self.scheduler.step).parameters}
        with_guidance = guided(self._network, null, scale)
        for t in self.progress_bar(self.scheduler.timesteps):
            net = with_guidance if interval[0] <= self._noise_level(t) <= interval[1] else self._network
            output = net(self.scheduler.scale_model_input(x, t), t.to(x.device).expand(len(x)), **condition)
            x = self.scheduler.step(output, t, x, **options).prev_sample
        return x

    def _noise_level(self, t: Tensor) -> float:
        """sigma / alpha at a timestep of the scheduler."""
        if not hasattr(self.scheduler, "alphas_cumprod"):
            return math.exp(4 * float(t))  # EDM: t is ln(sigma) / 4
        alpha_bar = float(self.scheduler.alphas_cumprod[int(t)])
        return math.sqrt((1 - alpha_bar) / alpha_bar)

    def _condition(self, prompt: Any, class_labels: Any, batch_size: int) -> tuple[Tensors, Tensors | None, int]:
        """The condition, the null condition of guidance if the model has one, and the number of images."""
        if self.text_encoder is not None:
            texts = [prompt] * batch_size if isinstance(prompt, str) or prompt is None else list(prompt)
            rows = self._encode(["", *[text or "" for text in texts]])
            null_text = {"encoder_hidden_states": rows[:1]} if self.config.null_text else None
            return {"encoder_hidden_states": rows[1:]}, null_text, len(texts)
        if prompt is not None:
            raise ValueError("prompt: this model is not conditioned on text; leave it out")
        if not self.config.num_classes:
            if class_labels is not None:
                raise ValueError("class_labels: this model is not conditioned on classes; leave them out")
            return {}, None, batch_size
        if class_labels is None:
            class_labels = [number % self.config.num_classes for number in range(batch_size)]
        if isinstance(class_labels, (int, str)):
            class_labels = [class_labels] * batch_size
        chosen = class_labels.tolist() if hasattr(class_labels, "tolist") else class_labels
        numbers = {name: number for number, name in enumerate(self.config.class_names)}
        numbers |= {number: number for number in range(self.config.num_classes)}
        if self.config.null_class:
            numbers = {"null": self.config.num_classes, **numbers}
        for unknown in [label for label in chosen if label not in numbers]:
            choices = f"choose 0 .. {self.config.num_classes - 1} or a class name"
            raise ValueError(f"class_labels: unknown {unknown!r}; {choices}")
        labels = torch.tensor([numbers[label] for label in chosen], device=self._execution_device)
        null = torch.tensor([self.config.num_classes], device=self._execution_device)
        return {"class_labels": labels}, {"class_labels": null} if self.config.null_class else None, len(labels)

    def _encode(self, texts: list[str]) -> Any:
        """Token features; zero for padding, except for CLIP."""
        options = {"padding": "max_length", "truncation": True, "max_length": self.config.text_tokens}
        tokens = self.tokenizer(texts, **options, return_tensors="pt").to(self._execution_device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        if type(self.text_encoder).__name__.startswith("CLIP"):
            hidden = self.text_encoder(input_ids=ids).last_hidden_state
        else:
            hidden = self.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        return hidden.half().to(self.unet.dtype)  # rounded as in training

    def _finish(self, x: Tensor, output_type: str, return_dict: bool) -> Any:
        images: Any = x
        if output_type != "latent":
            if self.vae is not None:
                latents = x / self.config.latent_scale + self.config.latent_shift
                images = self.vae.decode(latents.to(self.vae.dtype)).sample
            images = (images / 2 + 0.5).clamp(0, 1)
        if output_type in ("np", "pil"):
            images = images.float().cpu().permute(0, 2, 3, 1).numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)
