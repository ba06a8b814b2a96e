"""Model cards: what a model was trained on, how, and how good it is, from the records of its run."""

from __future__ import annotations

import dataclasses

from scalelong.runs import CONFIG
from scalelong.runs.reader import Measurement, Run
from scalelong.runs.settings import Conditioning, ConditionSettings


def model_card(
    run: Run, step: int, weights: str, shape: tuple[int, int, int], sizes: Conditioning | None = None
) -> str:
    """Markdown for the weights of this step, for images of this (channels, height, width)."""
    if sizes is None or sizes == Conditioning():
        return _card(run, step, weights, _LOADING.format(more="", arguments=shape))
    known = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    given = ", ".join(f"{key}={value}" for key, value in known.items() if value and isinstance(value, int))
    more = "\nfrom scalelong.runs.settings import Conditioning"
    return _card(run, step, weights, _LOADING.format(more=more, arguments=f"{shape}, Conditioning({given})"))


def pipeline_card(run: Run, step: int, weights: str) -> str:
    """Markdown for a folder that diffusers loads."""
    return "---\nlibrary_name: diffusers\n---\n\n" + _card(run, step, weights, _LOADING_PIPELINE)


def _card(run: Run, step: int, weights: str, loading: str) -> str:
    config = run.config
    scaling = ", ".join(f"{key} = {value}" for key, value in config.scaling.options().items() if key != "allow_amplify")
    prediction = config.diffusion.prediction or "the process's default target"
    measured = [m for m in run.evaluations if m.step == step and m.metric.weights == weights]
    lines = [
        f"# {config.model.backbone} trained on {config.data.name}",
        "",
        f"- **Data**: `{config.data.name}`, split {config.data.split}, flips {'on' if config.data.flip else 'off'}",
        f"- **Long skips**: {config.scaling.method}" + (f" ({scaling})" if scaling else "") + _kappa(run, step),
        f"- **Training**: {step:,} steps at batch {config.training.batch_size}, seed {run.seed}",
        f"- **Condition**: {_condition(config.condition)}",
        f"- **Diffusion**: {config.diffusion.process}, predicting {prediction}",
        f"- **Weights**: {'averaged (EMA)' if weights == 'ema' else 'as trained'}",
        f"- **Trained on**: {run.start[-1].get('device', 'unknown') if run.start else 'unknown'}",
        *("", "## Quality", ""),
        *(map(_quality, measured) if measured else ["Not measured at this step."]),
        *("", "## How to load", "", "```python", loading, "```", ""),
    ]
    return "\n".join(lines)


_LOADING = f"""import scalelong
from scalelong.training import from_yaml
from scalelong.training.build import build_model{{more}}

model = build_model(from_yaml("{CONFIG}"), {{arguments}})
scalelong.load(model, ".")"""


_LOADING_PIPELINE = """from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(".", trust_remote_code=True)  # runs the code in this folder, if it holds any
image = pipe(num_inference_steps=50).images[0]"""


def _condition(settings: ConditionSettings) -> str:
    what = {"none": "none", "class": "the class", "text": f"a text, by {settings.encoder}"}[settings.kind]
    return what if settings.kind == "none" else f"{what}; left out of {settings.drop:.0%} of the samples"


def _kappa(run: Run, step: int) -> str:
    values = next((record.get("kappa") for record in reversed(run.train) if record["step"] <= step), None)
    return f"; kappa_i, outermost first: {', '.join(f'{value:.3g}' for value in values)}" if values else ""


def _quality(measurement: Measurement) -> str:
    metric, how = measurement.metric, measurement.metric.sampling
    images = f"{metric.n:,} images of seed {'?' if measurement.seed is None else measurement.seed}"
    sampled = f"{how.sampler or '?'} with {how.steps or '?'} steps in {how.precision}"
    guided = f", guidance {how.guidance:g}" if how.guidance != 1 else ""
    return f"- {metric.name} = {measurement.value:.3f} ({images}, {sampled}{guided}, extractor {metric.extractor})"
