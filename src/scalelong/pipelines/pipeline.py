"""A pipeline for unconditional, class- and text-conditional diffusion of pixels or latents. Copied into exported folders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

Tensors = dict[str, Tensor]


class ScaleLongPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Any denoiser called like the UNets of diffusers, with any scheduler; components that a model does not need are None."""

    _optional_components = ["vae", "text_encoder", "tokenizer"]  # noqa: RUF012
    model_cpu_offload_seq = "text_encoder->unet->vae"

    def __init__(
        self,
        unet: Any,
        scheduler: Any,
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
        default_steps: int = 50,
        default_guidance: float = 1.0,
        guidance_interval: Any = (0.0, None),  # lowest and highest sigma / alpha; None: no bound
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(num_classes=num_classes, null_class=null_class, class_names=list(class_names))
        self.register_to_config(text_tokens=text_tokens, null_text=null_text)
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
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Sample images. latents: N(0, 1) noise to start from. output_type: pil, np, pt (in [0, 1]) or latent."""
        batch_size = batch_size if latents is None else len(latents)
        condition, null, batch_size = self._condition(prompt, class_labels, batch_size)
        scale = self.config.default_guidance if guidance_scale is None else guidance_scale
        if scale != 1 and null is None:
            raise ValueError(f"guidance_scale: {scale}, but this model has no null condition; leave it at 1")
        shape = (batch_size, self.unet.config.in_channels, *(self.unet.config.sample_size,) * 2)
        device, dtype = self._execution_device, self.unet.dtype
        x = randn_tensor(shape, generator, device, dtype) if latents is None else latents.to(device, dtype)
        self.scheduler.set_timesteps(num_inference_steps or self.config.default_steps, device=device)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)  # else schedulers look up the first timestep, which need not be unique
        x = x * self.scheduler.init_noise_sigma
        options = {"generator": generator, "use_clipped_model_output": True}  # where the scheduler has them
        options = {name: options[name] for name in options if name in inspect.signature(self.scheduler.step).parameters}
        for t in self.progress_bar(self.scheduler.timesteps):
            guided = scale != 1 and self._guided_at(t)
            scaled = self.scheduler.scale_model_input(x, t)
            output = self._predict(scaled, t, condition, null if guided else None, scale)
            x = self.scheduler.step(output, t, x, **options).prev_sample
        return self._finish(x, output_type, return_dict)

    def _predict(self, x: Tensor, t: Tensor, condition: Tensors, null: Tensors | None, scale: float) -> Any:
        """The network's output, by classifier-free guidance unless `null` is None."""
        time = t.to(x.device).expand(len(x))
        if null is None:
            return self.unet(x, time, **condition, return_dict=False)[0]
        both = {name: torch.cat([value, null[name].expand(value.shape)]) for name, value in condition.items()}
        output = self.unet(torch.cat([x, x]), torch.cat([time, time]), **both, return_dict=False)[0]
        conditional, unconditional = output.chunk(2)
        return unconditional + scale * (conditional - unconditional)

    def _guided_at(self, t: Tensor) -> bool:
        """Whether the noise level sigma / alpha is inside the guidance interval."""
        low, high = self.config.guidance_interval
        if not low and high is None:
            return True
        if hasattr(self.scheduler, "alphas_cumprod"):
            alpha_bar = float(self.scheduler.alphas_cumprod[int(t)])
            level = math.sqrt((1 - alpha_bar) / alpha_bar)
        else:
            level = math.exp(4 * float(t))  # EDM: t is ln(sigma) / 4
        return (low or 0.0) <= level <= (math.inf if high is None else high)

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
        for unknown in [label for label in chosen if label not in numbers]:
            choices = f"choose 0 .. {self.config.num_classes - 1} or a class name"
            raise ValueError(f"class_labels: unknown {unknown!r}; {choices}")
        labels = torch.tensor([numbers[label] for label in chosen], device=self._execution_device)
        null = torch.tensor([self.config.num_classes], device=self._execution_device)
        return {"class_labels": labels}, {"class_labels": null} if self.config.null_class else None, len(labels)

    def _encode(self, texts: list[str]) -> Any:
        """Features of the tokens; zeros after the end of a text, except for CLIP, which has features there too."""
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
