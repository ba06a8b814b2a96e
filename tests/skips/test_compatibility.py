"""Families x situations: every cell is run; a known limit must show, without the scaling too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import scalelong
from tests.compatibility import SITUATIONS, Subject, limits, subjects
from tests.families import FAMILIES, assert_same_weights, build

LIMITS = limits()


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("subject", subjects().values(), ids=lambda subject: subject.name)
def test_a_scaled_model_works_with(subject: Subject, situation: str) -> None:
    limit = LIMITS.get((subject.name, situation))
    if limit is None:
        SITUATIONS[situation](subject)
        return
    with pytest.raises(Exception, match=limit.error):
        SITUATIONS[situation](subject)
    if situation not in ("DDP", "FSDP2"):
        with pytest.raises(Exception, match=limit.error):
            SITUATIONS[situation](replace(subject, leave=True))


def test_a_model_wrapped_by_peft_is_refused_with_the_remedy() -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(build(FAMILIES[0]), LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(TypeError, match="before get_peft_model, to the module inside it, got PeftModel"):
        scalelong.apply(wrapped, "cs")
    assert len(scalelong.apply(wrapped.get_base_model(), "cs").skips) == FAMILIES[0].num_skips


def test_a_saved_diffusers_pipeline_samples_the_same_images(tmp_path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    def sample(pipeline: DDPMPipeline) -> torch.Tensor:
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return torch.from_numpy(pipeline(generator=generator, num_inference_steps=2, output_type="np").images)

    model = build(FAMILIES[0])
    plain = sample(DDPMPipeline(model, DDPMScheduler()))
    scalelong.apply(model, "cs", kappa=0.5)
    scaled = DDPMPipeline(model, DDPMScheduler())
    scaled.save_pretrained(tmp_path)
    unet = scalelong.from_pretrained(UNet2DModel, tmp_path, subfolder="unet").eval()
    assert_same_weights(unet, model)
    images = sample(DDPMPipeline.from_pretrained(tmp_path, unet=unet))
    torch.testing.assert_close(images, sample(scaled), rtol=1e-4, atol=1e-4)  # sampling amplifies rounding errors
    assert not torch.allclose(images, plain, atol=1e-2)
