"""What the documents say is so: the README's example runs, its tree is the tree, its commands are there."""

import ast
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxsample
from tests.test_generate import checkpoint  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LISTED_FOLDERS = ("jaxsample", "models", "scripts", "benchmarks", "tests")
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/design.md",
    "docs/contract.md",
    "docs/measured.md",
    "docs/migration.md",
    "docs/training.md",
    "docs/results.md",
    *(
        f"docs/{page}.md"
        for page in ("sampling", "speculation", "guidance", "sharding", "serving", "kernels")
    ),
]


def code_block(mark: str) -> str:
    """The code block that follows `<!-- mark -->` in the README."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no code block after <!-- {mark} -->"
    return found.group(1)


def test_the_example_runs_and_its_greedy_row_is_the_largest_logit():
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code_block("example"), "README.md", "exec"), names)
    tokens = names["draw"](names["logits"], names["params"], jnp.array([12, 7])).tokens
    assert printed.getvalue().strip() == str(tokens)
    assert int(tokens[1]) == int(jnp.argmax(names["logits"][1]))
    assert 0 <= int(tokens[0]) < 50_000


def test_the_example_of_speculation_runs_alone_and_gives_the_toys_own_text_in_fewer_steps():
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code_block("speculation"), "README.md", "exec"), names)
    token, wanted = 6, []
    for _ in range(40):
        token = int(names["weights"][0][token].argmax())
        wanted.append(token)
    assert names["text"] == wanted and names["num_steps"] < 30


def test_the_example_of_other_software_runs_alone():
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code_block("interop"), "README.md", "exec"), names)
    assert names["stop"].max_tokens[0] == 100 and names["told"].stop_strings == ("\n\n",)
    tokens = [int(word) for word in printed.getvalue().strip("[] \n").split()]
    assert len(tokens) == 2 and all(0 <= token < 1000 for token in tokens)


@pytest.mark.slow
def test_the_example_of_serving_runs_with_a_tiny_model_in_place_of_the_weights(checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.setattr("models.fetch.fetch_smollm2", lambda: checkpoint)
    least = lambda *_, **modes: (jaxsample.Features(tier="filtered", full_rows=False, **modes),)
    monkeypatch.setattr("models.engines._levels", least)  # few programs to compile
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code_block("serving"), "README.md", "exec"), {})
    assert {line.split()[0] for line in printed.getvalue().splitlines() if line[:1].isdigit()} >= {"0", "1"}


def test_every_python_block_of_the_readme_is_one_that_is_run():
    marks = re.findall(r"^(?:<!-- (\w+) -->\n)?```python$", README, re.MULTILINE)
    assert marks == ["example", "speculation", "mesh", "interop", "serving"]


SLOW_PAGES = ("speculation", "guidance", "sharding", "serving", "kernels")


@pytest.mark.parametrize(
    "page", ["sampling", *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PAGES)]
)
def test_the_examples_of_a_page_run_and_what_they_assert_holds(page):
    if page == "sharding" and len(jax.devices()) < 8:
        pytest.skip("eight devices are needed")
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks and "assert" in text
    names: dict = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_the_changelog_begins_with_this_version():
    found = re.search(
        r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert found and found.group(1) == jaxsample.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxsample.__version__)


def test_the_example_of_a_mesh_runs_as_a_program_of_its_own(tmp_path):
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", code_block("mesh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("equal to one device: True\n", 0), done.stderr


def test_the_example_fits_in_fifteen_lines():
    assert len([line for line in code_block("example").splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("mark", ["main-job", "tests"])
def test_the_readme_gives_each_job_as_one_command(mark):
    assert len(code_block(mark).splitlines()) == 1


def test_the_readme_lists_every_source_file_and_no_other():
    listed = set(re.findall(r"^ {4}(\S+\.py)\b", README, re.MULTILINE))
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in LISTED_FOLDERS
        for path in (ROOT / folder).glob("**/*.py")
    }
    assert listed == files


def test_the_design_lists_the_modules_in_the_order_of_their_imports():
    design = (ROOT / "docs/design.md").read_text()
    listed = re.findall(
        r"^\| `(\w+)` \|", design[design.index("## 4.") : design.index("## 5.")], re.MULTILINE
    )
    order = ast.parse((ROOT / "tests/test_imports.py").read_text())
    names = next(
        node.value
        for node in order.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULE_ORDER"
    )
    assert tuple(listed) == ast.literal_eval(names)


def test_the_table_of_names_has_every_argument_that_requests_share():
    table = (ROOT / "docs/migration.md").read_text().split("## Meaning")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    arguments = list(inspect.signature(jaxsample.make_params).parameters)
    own = {"limits", "prompt_length", "token_temperature_scale"}  # what no other software has
    assert named == [name for name in arguments if name not in own]


def test_every_public_name_has_a_docstring():
    undocumented = [
        name
        for name in jaxsample.__all__
        if callable(getattr(jaxsample, name)) and not (getattr(jaxsample, name).__doc__ or "").strip()
    ]
    assert undocumented == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:docs|scripts|benchmarks|tests|models|jaxsample|\.ci)/[\w./-]*)`", text))
    missing = {name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()}
    assert missing == set()
