"""What the README and the docs say is what happens: their Python runs, their commands parse, their tables are current."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import scalelong
from scalelong.cli import arguments as cli_arguments
from scalelong.cli.main import VERBS, main
from scalelong.diffusion import VPSDE
from scalelong.stability.kappa import CROSSOVER, USUAL_KAPPA, recommend_kappa
from scalelong.training import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
NETWORKS = ("found", "sources")  # tables of docs/families.md
NOTEBOOK = DOCS / "tutorial.ipynb"
ELSEWHERE = ("extending.md",)  # applied to a copy of the sources by test_extending.py
SLOW = ("export.md", "features.md", "migrate.md", "use.md")
sys.path.insert(0, str(ROOT / "scripts"))

from docs_hook import tutorial  # noqa: E402


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.S | re.M)


def run_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, as a reader pastes it."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    if name == "README.md":  # "your model"
        names["model"] = scalelong.UViT(scalelong.UViTConfig(image_size=8, patch_size=4, dim=32, depth=4, heads=2))
    if name == "export.md":  # the run of `make demo`, shorter
        run("scalelong train digits-demo --steps 2 --training.checkpoint-every 2 --out runs/demo/cs-seed0")
        run(next(line for line in PAGES[name].splitlines() if line.startswith("scalelong export")))
    for block in blocks(PAGES[name], "python"):
        exec(compile(block, name, "exec"), names)
    return names


def run(line: str) -> None:
    assert main(shlex.split(line, comments=True)[1:]) == 0, line


def pages_with_python(slow: bool) -> list[str]:
    found = [name for name, text in PAGES.items() if blocks(text, "python") and name not in ELSEWHERE]
    return [name for name in found if (name in SLOW) is slow]


@pytest.mark.parametrize("name", pages_with_python(slow=False))
def test_python_runs_as_pasted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", pages_with_python(slow=True))
def test_longer_python_runs_as_pasted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(name, tmp_path, monkeypatch)


def calls_in_tables() -> list[str]:
    return re.findall(r"^\| `(apply\(.+?\))` \|", PAGES["use.md"], flags=re.M)


@pytest.mark.parametrize("call", calls_in_tables())
def test_calls_in_tables_run(call: str) -> None:
    from diffusers import UNet2DModel

    types = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=8, block_out_channels=(32, 32), layers_per_block=1, **types)
    uvit = scalelong.UViT(scalelong.UViTConfig(image_size=8, patch_size=4, dim=32, depth=6, heads=2))
    names = {"apply": scalelong.apply, "model": model.eval(), "uvit": uvit.eval()}
    assert eval(call, names).model is not None  # noqa: S307


def test_the_tables_have_these_calls() -> None:
    assert len(calls_in_tables()) > 10


def commands() -> list[str]:
    """Every `scalelong ...` of a bash block or of a cell of the notebook, with how it was started left out."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    pages = [text for name, text in PAGES.items() if name not in ELSEWHERE]
    texts = [block for text in pages for block in blocks(text, "(?:bash|)")]
    texts += ["".join(cell["source"]).replace("!", "") for cell in cells if cell["cell_type"] == "code"]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"^(torchrun|accelerate launch) .*-m scalelong\.cli\.main", "scalelong", line) for line in lines]
    return [line.strip() for line in dict.fromkeys(found) if line.startswith("scalelong ")]


class ParsedError(Exception):
    """The flags were read; the command itself is not run."""


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)[1:]
    assert words[0] in VERBS
    module = import_module(f"scalelong.cli.{words[0]}")

    def only_parse(parse: Any) -> Any:
        def parsed(*given: Any, **options: Any) -> Any:
            parse(*given, **options)
            raise ParsedError

        return parsed

    monkeypatch.setattr(tyro, "cli", only_parse(tyro.cli))
    monkeypatch.setattr(cli_arguments, "subcommand_cli_from_dict", only_parse(cli_arguments.subcommand_cli_from_dict))
    with pytest.raises(ParsedError):
        module.main(words[1:])
    if words[0] == "train" and not words[1].startswith("-"):
        assert words[1] in PRESETS, line


def test_wrong_commands_do_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        test_commands_parse("scalelong report --no-such-flag", monkeypatch)


def test_the_docs_name_every_preset() -> None:
    assert all(f"`{name}`" in PAGES["train.md"] for name in PRESETS)


def errors_in_the_faq() -> list[str]:
    return re.findall(r"^### `(.+)`$", PAGES["faq.md"], flags=re.M)


def source_text() -> str:
    """All of src, with string literals that continue on the next line joined."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("message", errors_in_the_faq())
def test_messages_of_the_faq_are_those_of_the_source(message: str) -> None:
    source = source_text()
    for part in message.split("…"):
        assert part.strip(" ;,") in source, part


def test_a_changed_message_would_be_noticed() -> None:
    assert len(errors_in_the_faq()) > 15
    assert "scaled already; call scalelong.undo" not in source_text()


@pytest.mark.parametrize("script", ["study_table.py", "experiments_page.py"])
def test_generated_tables_are_those_of_the_results(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wrong_number_in_the_readme_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import figures_table

    page = tmp_path / "README.md"
    page.write_text("<!-- headline: begin -->\n\nFID 3.1\n\n<!-- headline: end -->\n")
    monkeypatch.setattr(figures_table, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/study_table.py", "--check"])
    with pytest.raises(SystemExit, match=r"headline is out of date; run scripts/study_table\.py"):
        figures_table.fill(page, "headline", "FID 32.3")


def test_what_is_called_level_is_what_two_unscaled_runs_differ_by() -> None:
    import study_table

    found = study_table.pairs()
    loss, fid, base, _ = study_table.at_end(found[study_table.AGAIN], study_table.last_step(found[study_table.AGAIN]))
    assert (round(abs(loss), 1), round(abs(fid - base), 1)) == (study_table.LEVEL_LOSS, study_table.LEVEL_FID)
    mild = max(found[study_table.MILD], key=lambda pair: pair.last)
    assert mild.base_fid == found[study_table.AGAIN][0].fid  # the unscaled run of the same kernels


def test_the_page_says_which_rate_is_best() -> None:
    import study_rates
    import study_table

    found = study_rates.found_rates(study_table.PIECE)
    best = study_rates.best(found)
    with study_table.CURVES.open(newline="") as file:
        ends = [row for row in csv.DictReader(file) if (row["step"], row["seed"]) == (str(study_rates.END), "1")]
    for method in ("none", "ls"):
        rates = {row["experiment"]: float(row["test_loss"]) for row in ends if row["method"] == method}
        assert best[method][1] == min(rates.values())
    assert best["none"][0] == 5e-4
    assert all(loss > best["none"][1] for method, (_, loss) in best.items() if method != "none")
    row = next(row for row in study_rates.rate_table(found, {}).splitlines() if row.startswith("| ls |"))
    assert re.findall(r"\*\*(\S+) ", row) == [f"{best['ls'][1]:.5f}"]


def test_the_advice_of_kappa_is_that_of_the_study() -> None:
    import study_table

    found = study_table.pairs()[f"cs kappa={USUAL_KAPPA:g}"]
    level = [pair.level_at for pair in found]
    assert None not in level
    assert CROSSOVER - 10_000 < max(level) <= CROSSOVER  # type: ignore[type-var]
    end = max(pair.last for pair in found)
    assert study_table.verdict(*study_table.at_end(found, end)[:3]) == "on par with"
    lead = -min(min(pair.loss.values()) for pair in found)
    said = recommend_kappa(torch.rand(64, 3, 8, 8) * 2 - 1, VPSDE(), num_skips=6, samples=100, steps=CROSSOVER).advice
    assert f"at most {lead:.1f}% ahead in training loss and ended on par" in said
    assert "LS throughout" in said and all(min(pair.loss.values()) > 0 for pair in study_table.pairs()["ls"])


def test_the_number_of_networks_in_the_readme_is_that_of_the_table() -> None:
    """Classes of others that were compared with the oracle; stand-ins and our own are not counted."""
    tables = (re.search(rf"<!-- {t}: begin -->(.*?)<!-- {t}: end -->", PAGES["families.md"], re.S) for t in NETWORKS)
    rows = [row for table in tables if table for row in table[1].splitlines() if "| equal |" in row]
    count = sum("stand-in" not in row and "| scalelong |" not in row for row in rows)
    assert f"{count} networks" in README


def test_the_readme_has_its_two_commands_and_fits_two_screens() -> None:
    assert re.search(r"^make demo ", README, flags=re.M)
    assert re.search(r"^make test ", README, flags=re.M)
    assert len(README.splitlines()) < 80


@pytest.mark.parametrize("page", ["cli.md", "settings.md", "tutorial.md"])
def test_generated_pages(page: str) -> None:
    import docs_hook

    text = {"cli.md": docs_hook.command_line, "settings.md": docs_hook.settings, "tutorial.md": docs_hook.tutorial}[
        page
    ]()
    expected = {
        "cli.md": [*(f"\n## {verb}\n" for verb in VERBS), "\n### data fetch\n", "\n### autoencoder train\n"],
        "settings.md": [
            "`training.batch_size` | integer from 1",
            "`training.steps` ↻",
            "clip the gradient to this norm",
        ],
        "tutorial.md": ["```bash\nscalelong compare", "```python\nimport scalelong"],
    }[page]
    assert all(each in text for each in expected)
    assert page != "cli.md" or max(map(len, text.splitlines())) <= 100  # fits its box


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "run_notebook.py", NOTEBOOK, "--steps", "50"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no scaling" in done.stdout and "nan" not in done.stdout
    assert (tmp_path / "runs" / "tutorial" / "report.html").is_file()


def test_the_tutorial_shows_what_its_cells_print() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    assert tutorial().count("<img") == 2


@pytest.mark.slow
def test_the_table_of_families_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "families_table.py", "--check", "--known"], check=True)


@pytest.mark.slow
def test_the_tables_of_what_was_tried_are_up_to_date() -> None:
    if not (ROOT / ".venv" / "packages" / ".installed").exists():
        pytest.skip("make test-slow installs tests/packages.txt")
    subprocess.run([sys.executable, ROOT / "scripts" / "families_table.py", "--check"], check=True)


def test_lines_of_code_fit_the_page() -> None:
    """At 1280 px a box of the site holds 110 characters, one of a README fewer."""
    for name, text in PAGES.items():
        limit = 96 if name == "README.md" else 110
        for block in blocks(text, r"(?:python|bash|text|yaml|json|bibtex|)"):
            assert max(map(len, block.splitlines())) <= limit, (name, block)
