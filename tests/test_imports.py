"""What the tree promises about itself: one-way imports, small files, plain names, nothing machine-specific.

Reads source text only; knows nothing about sampling.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module of jaxsample imports only from those above it.
MODULE_ORDER = (
    "rng",
    "params",
    "admission",
    "guidance_rows",
    "draft",
    "history",
    "candidates",
    "truncation",
    "penalties",
    "shaping",
    "draw",
    "law",
    "logprobs",
    "target",
    "tilt",
    "guidance",
    "guidance_modes",
    "verify",
    "lossless",
    "lossless_tree",
    "nodes",
    "sharding",
    "kernel_math",
    "first_kernel",
    "whole_kernel",
    "row_draw",
    "sample",
    "lanes",
    "head",
    "head_kernel",
    "head_summary",
    "head_sample",
    "head_score",
    "loops",
    "interop",
    "exchange",
    "quantize",
    "paged",
    "kvcache",
    "requests",
    "propose",
    "chained",
    "adaptive",
    "record",
    "decode",
    "guided",
    "buckets",
    "staging",
    "prompt_scores",
    "slots",
    "lowering",
    "grammar",
    "intake",
    "pages",
    "streams",
    "seats",
    "counts",
    "schedule",
    "engine",
)
ALLOWED_OUTSIDE = {"jax", "jaxlib", "numpy"}
MAX_LINES = 400
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
FOLDERS = ("jaxsample", "models", "scripts", "benchmarks", "tests", "docs")

LIBRARY_FILES = sorted((ROOT / "jaxsample").glob("**/*.py"))
PYTHON_FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".txt", ".cfg", ".sh", ""}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> list[tuple[str, str | None]]:
    """Every import of a file of jaxsample, at any depth, as (outside package, None) or ("jaxsample", module).

    `module` is None where the package itself is imported, whose `__init__` pulls in everything.
    """
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "jaxsample" if node.level else ""
            base = ".".join(part for part in (base, node.module or "") if part)
            # `from jaxsample import rng` names its module in the alias; `from jaxsample.rng import f` before.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "jaxsample" else [base]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            found.append((package, (rest.split(".")[0] or None) if package == "jaxsample" else None))
    return found


def text_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    below = [path for folder in FOLDERS for path in (ROOT / folder).glob("**/*") if path.is_file()]
    return [
        path
        for path in sorted(top + below)
        if path.suffix in TEXT_SUFFIXES
        and "__pycache__" not in path.parts
        and ".hypothesis" not in path.parts
    ]


def test_every_library_module_has_its_place_in_the_order():
    modules = {path.stem for path in LIBRARY_FILES} - {"__init__"}
    assert modules == set(MODULE_ORDER)


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=relative)
def test_library_modules_import_only_from_those_above(path):
    if path.stem == "__init__":
        above = set(MODULE_ORDER)
    else:
        above = set(MODULE_ORDER[: MODULE_ORDER.index(path.stem)])
    inside = {module for package, module in imports(path) if package == "jaxsample"}
    assert inside <= above


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=relative)
def test_the_library_needs_only_jax_numpy_and_the_standard_library(path):
    outside = {package for package, _ in imports(path) if package != "jaxsample"}
    assert outside <= ALLOWED_OUTSIDE | sys.stdlib_module_names


@pytest.mark.parametrize("folder", ["jaxsample", "models"])
def test_no_file_is_longer_than_the_limit(folder):
    files = (ROOT / folder).glob("**/*.py")
    long = {
        relative(path): lines for path in files if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_file_is_named_like_a_standard_library_module():
    names = {relative(path) for path in PYTHON_FILES if path.stem in sys.stdlib_module_names}
    assert names == set()


def test_every_file_is_named_for_what_it_holds():
    vague = {relative(path) for path in PYTHON_FILES if VAGUE_NAMES & set(path.stem.lower().split("_"))}
    assert vague == set()


def test_every_python_file_says_what_it_is():
    silent = {
        relative(path)
        for path in PYTHON_FILES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    }
    assert silent == set()


def test_no_file_holds_a_machine_path_or_a_registry_address():
    machine_path = re.compile(r"/(?:root|work|farm|tmp|home)/[A-Za-z0-9_.]")
    registry = re.compile(
        r"index[-_]url|find[-]links|https?://\S*(?:pypi|pythonhosted|npmjs|debian)\b", re.IGNORECASE
    )
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if machine_path.search(line) or registry.search(line):
                found.append(f"{relative(path)}:{number}")
    assert found == []


def test_no_lock_file_is_kept():
    locks = {path.name for path in ROOT.iterdir() if re.search(r"lock(\.json)?$", path.name, re.IGNORECASE)}
    assert locks == set()
