"""Model cards, generated from the records of a run."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from scalelong.runs import CONFIG
from scalelong.runs.reader import Run
from scalelong.runs.records import Measurement
from scalelong.runs.settings import Conditioning, SamplingSettings

_LOADING = f"""import scalelong
from scalelong.training import from_yaml
from scalelong.training.build import build_model{{more}}

model = build_model(from_yaml("{CONFIG}"), {{arguments}})
scalelong.load(model, ".")"""

_LOADING_PIPELINE = """from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("."{trust})
images = pipe(batch_size=4{seed}, num_inference_steps={steps}).images"""


def model_card(run: Run, step: int, weights: str, shape: tuple[int, int, int], sizes: Conditioning) -> str:
    """Markdown for the weights of this step, for images of this (channels, height, width)."""
    given = [f"{key}={value}" for key, value in asdict(sizes).items() if value and isinstance(value, int)]
    more = "\nfrom scalelong.runs.settings import Conditioning" if given else ""
    arguments = f"{shape}, Conditioning({', '.join(given)})" if given else f"{shape}"
    return _card(run, step, weights, _LOADING.format(more=more, arguments=arguments))


def pipeline_card(run: Run, step: int, weights: str, sampling: SamplingSettings, plain: bool) -> str:
    """Markdown for a folder that diffusers loads."""
    trust, seed = ("", "") if plain else (", trust_remote_code=True", ", seed=0")
    loading = _LOADING_PIPELINE.format(trust=trust, seed=seed, steps=sampling.steps)
    how = f"{sampling.sampler} with {sampling.steps} steps"
    note = "the images of `scalelong sample` up to rounding; the code in this folder samples them"
    if plain:
        note = "by diffusers' scheduler, which rounds times, so images differ slightly from `scalelong sample`"
    return "---\nlibrary_name: diffusers\n---\n\n" + _card(run, step, weights, loading, f"{how}: {note}")


def plain(value: Any) -> Any:
    """Escape a value as one line of text for Markdown and HTML; Markup is kept.

    >>> plain("<b>*cs*</b>")
    '&lt;b&gt;\\\\*cs\\\\*&lt;/b&gt;'
    """
    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|!])", r"\\\1", text)


def _card(run: Run, step: int, weights: str, loading: str, sampling: str = "") -> str:
    options = {"trim_blocks": True, "keep_trailing_newline": True, "undefined": StrictUndefined, "finalize": plain}
    environment = Environment(loader=PackageLoader("scalelong.report"), **options)  # type: ignore[arg-type]
    measured = [m for m in run.evaluations if m.step == step and m.metric.weights == weights]
    return environment.get_template("card.md").render(
        config=run.config,
        step=step,
        weights=weights,
        options=[f"{key} = {value}" for key, value in run.config.scaling.options().items() if key != "allow_amplify"],
        kappa=[f"{value:.3g}" for value in run.coefficients(step)],
        device=run.start[-1].get("device", "unknown") if run.start else "unknown",
        quality=[*map(_quality, measured)],
        loading=Markup(loading),  # our own text and the names of our settings
        sampling=Markup(sampling),
    )


def _quality(measurement: Measurement) -> str:
    metric, how = measurement.metric, measurement.metric.sampling
    images = f"{metric.n:,} images of seed {'?' if measurement.seed is None else measurement.seed}"
    sampled = f"{how.sampler or '?'} with {how.steps or '?'} steps in {how.precision}"
    guided = f", guidance {how.guidance:g}" if how.guidance != 1 else ""
    return f"{metric.name} = {measurement.value:.3f} ({images}, {sampled}{guided}, extractor {metric.extractor})"
