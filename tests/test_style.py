"""What src/ must not do: unpickle, run code of others, or write outside the atomic writer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scalelong"
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
WRITES = {  # methods and functions that write a file of the name they are given
    *("write_text", "write_bytes", "save", "savefig", "save_file", "save_model", "save_pretrained", "tofile"),
    *("savez", "savez_compressed", "savetxt", "copy", "copy2", "copyfile", "copyfileobj", "symlink_to"),
}
MODULES = {"copy", "copy2", "copyfile", "copyfileobj"}  # of shutil; other objects' copy() are no files
OURS = {"write_text", "save", "scalelong.save", "statistics.save"}  # write atomically
STAGED = {  # functions that write into a folder that `atomic_folder` made, or into a scratch folder, and why others may
    "files.py": {"atomic_write", "open_inside", "opener"},
    "training/checkpoint.py": {"save_checkpoint"},
    "training/autoencoder.py": {"_train", "_finish"},
    "pipelines/__init__.py": {"_write_denoiser", "_write_encoders"},
    "data/fashion_mnist.py": {"unpack"},
    "data/cifar10.py": {"unpack", "_rebuild"},
    "data/download.py": {"copy_members", "http_get"},
    "report/html.py": {"_encoded"},  # into memory
    "skips/patches.py": {"save"},  # the methods of diffusers and peft that these wrap
    "data/latents.py": {"_encode"},  # the autoencoder, checked by its digest right after
}


def offences(tree: ast.AST, name: str = "") -> list[str]:
    """What is forbidden in a module, as "line: what"."""
    found: list[str] = []

    def visit(node: ast.AST, function: str, atomic: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.With):
            opened = {ast.unparse(item.context_expr).partition("(")[0] for item in node.items}
            atomic = atomic or not opened.isdisjoint({"atomic_write", "atomic_folder"})
        found.extend(f"{node.lineno}: {what}" for what in _offence(node, atomic or function in STAGED.get(name, ())))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, function, atomic)

    visit(tree, "", False)
    return found


def _offence(node: ast.AST, may_write: bool) -> list[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return [f"imports {name}" for name in names if name.partition(".")[0] in UNPICKLES]
    if not isinstance(node, ast.Call):
        return []
    called = ast.unparse(node.func)
    owner, _, method = called.rpartition(".")
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    offence = []
    if called == "torch.load" and keywords.get("weights_only") != "True":
        offence.append("torch.load without weights_only=True")
    if owner == "yaml" and method in ("load", "unsafe_load", "full_load", "load_all", "unsafe_load_all"):
        offence.append(f"yaml.{method}")
    if keywords.get("trust_remote_code", "False") != "False":
        offence.append("trust_remote_code")
    if keywords.get("allow_pickle", "False") != "False":
        offence.append("allow_pickle")
    mode = [keywords.get("mode", "")] + [ast.unparse(argument) for argument in node.args[: 2 if not owner else 1]]
    opens = method == "open" and any(set(text) & set("wax+") for text in mode if text[:1] in "'\"" and len(text) < 6)
    writes = method in WRITES and (owner == "shutil" if method in MODULES else called not in OURS)
    if (opens or writes) and not may_write:
        offence.append(f"writes a file by {called}; use scalelong.files")
    return offence


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_unpickles_runs_others_code_or_writes_by_itself(path: Path) -> None:
    name = path.relative_to(SOURCE).as_posix()
    assert offences(ast.parse(path.read_text()), name) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "path.write_text('x')",
        "open(path, 'w')",
        "path.open('ab')",
        "path.open(mode='w')",
        "figure.savefig(path)",
        "shutil.copyfile(a, b)",
        "save_file(tensors, path)",
    ],
)
def test_each_of_these_is_found(line: str) -> None:
    assert len(offences(ast.parse(line))) == 1


def test_reading_and_the_atomic_writer_are_allowed() -> None:
    allowed = "open(path)\npath.open('rb')\nvalues.copy()\nwrite_text(path, 'x')\ntorch.load(f, weights_only=True)\n"
    assert offences(ast.parse(allowed + "with atomic_write(path) as file:\n    figure.savefig(file)\n")) == []
