"""The source distribution and the wheels: their contents, and that they run outside the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import cmab_kernels
from cmab_kernels.runtime.extension import load

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cmab_kernels", "python/cmab_models")
DEPENDENCIES = Path(torch.__file__).parents[1]
FAMILIES = """
import sys, torch, cmab_kernels as ck
from cmab_kernels import info, nn
print("from", ck.__file__)
x, y = torch.randn(2, 1, 4, 200, 16)
out = ck.latent_attention(torch.randn(4, 8, 16), x, y)
fit = ck.intention(x, x, y, 0.1)
first, rest = x[:, :, :64], x[:, :, 64:]
state = ck.continual_nystrom_init(first, first, first, num_landmarks=8)
step, state = ck.continual_nystrom_step(state, rest, rest, rest)
summary = nn.CMAB(32, 8, 4)(torch.randn(1, 50, 32), torch.randn(1, 8, 32))
assert all(tensor.isfinite().all() for tensor in (out, fit, step, summary))
print("extension", "cmab_kernels._C" in sys.modules)
print(info.report())
"""
"""A program that calls each family and a module, and prints `info`, with whichever package Python finds."""

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or any(importlib.util.find_spec(name) is None for name in ("ninja", "setuptools")),
    reason="needs the checkout, and ninja and setuptools beside it",
)


def _build(what: str, source: Path, target: Path, **variables: str) -> Path:
    """Build `what`, "sdist" or "wheel", in `source`; return the file that setuptools writes to `target`."""
    target.mkdir(parents=True)
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(target)!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=source, env={**_outside(), **variables}, check=True, capture_output=True
    )
    (built,) = target.iterdir()
    return built


def _outside() -> dict[str, str]:
    """Return the environment without variables that point Python to the checkout,
    or setup.py to a compiler of the tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CXX", "CUDA_HOME", "CMAB_KERNELS_BUILD", "CMAB_KERNELS_CUDA")
    }


def _run(folder: Path, *arguments: str) -> str:
    """Return the printed text of a Python that finds the package only in `folder`: -S turns off an editable
    installation's finder."""
    environment = {**_outside(), "PYTHONPATH": os.pathsep.join([str(folder), str(DEPENDENCIES)])}
    done = subprocess.run(
        [sys.executable, "-S", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution from a copy, so that the checkout does not change; return the unpacked folder."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    copy.mkdir()
    for name in ("csrc", "cmab_kernels", "python", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    built = _build("sdist", copy, tmp_path_factory.mktemp("sdist") / "dist")
    with tarfile.open(built) as archive:
        archive.extractall(built.parent, filter="data")
    return built.parent / built.name.removesuffix(".tar.gz")


def test_the_source_distribution_holds_what_it_needs(sdist: Path) -> None:
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()} <= files
    python = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert python | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= files
    assert {"cmab_kernels/py.typed", "cmab_kernels/runtime/tiles.json"} <= files


def test_the_source_distribution_holds_nothing_else(sdist: Path) -> None:
    """The source distribution has no tests, whose data would be missing, and nothing that an earlier build left."""
    top = {path.name for path in sdist.iterdir() if path.is_dir()}
    assert top == {"csrc", "cmab_kernels", "cmab_kernels.egg-info", "python"}
    assert [path.name for path in (sdist / "python").iterdir()] == ["cmab_models"]
    assert not [path for path in sdist.rglob("*") if path.suffix in (".so", ".pyc") or path.name == "_build.json"]


def test_one_version(sdist: Path) -> None:
    assert sdist.name.endswith(f"-{cmab_kernels.__version__}")
    written = {name: (ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")}
    assert re.search(r"^version: (\S+)$", written["CITATION.cff"], re.MULTILINE)[1] == cmab_kernels.__version__  # type: ignore[index]
    assert f"## [{cmab_kernels.__version__}]" in written["CHANGELOG.md"] or "## [Unreleased]" in written["CHANGELOG.md"]


def test_the_lock_holds_what_the_tests_need() -> None:
    """Every direct requirement of the tests has one version with hashes,
    torch that of constraints.txt; no index is named."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    text = (ROOT / "requirements-test.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) .*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    assert len(locked) == len(re.findall(r"^[\w.-]+", text, re.MULTILINE)) and "://" not in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [each for name in ("demo", "models", "bench", "test") for each in extras[name]] + project["dependencies"]
    of_311 = [each for each in wanted if "python_version < '3.11'" not in each]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in of_311}
    assert names - {"cmab-kernels"} <= set(locked)
    assert f"\ntorch=={locked['torch'].partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()


def _check_bill(path: Path) -> None:
    """Check that the bill of materials is an SPDX document that names the package and its dependencies."""
    bill = json.loads(path.read_text())
    assert (bill["spdxVersion"], bill["dataLicense"], bill["SPDXID"]) == ("SPDX-2.3", "CC0-1.0", "SPDXRef-DOCUMENT")
    assert (
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bill["creationInfo"]["created"])
        and bill["creationInfo"]["creators"]
    )
    assert re.fullmatch(r"https://[^#\s]+", bill["documentNamespace"]) and bill["name"]
    packages = {package["SPDXID"]: package for package in bill["packages"]}
    assert all(re.fullmatch(r"SPDXRef-[\w.-]+", name) for name in packages) and len(packages) == len(bill["packages"])
    assert all({"name", "downloadLocation", "filesAnalyzed"} <= set(package) for package in bill["packages"])
    relations = {(r["spdxElementId"], r["relationshipType"], r["relatedSpdxElement"]) for r in bill["relationships"]}
    own = "SPDXRef-cmab-kernels"
    assert relations == {
        ("SPDXRef-DOCUMENT", "DESCRIBES", own),
        *((own, "DEPENDS_ON", f"SPDXRef-{name}") for name in ("torch", "numpy")),
    }
    assert (
        set(packages) == {whom for _, _, whom in relations} and packages[own]["versionInfo"] == cmab_kernels.__version__
    )


@pytest.mark.parametrize(
    "how, reason", [("switched off", "CMAB_KERNELS_BUILD=0"), ("without a compiler", "no C++ compiler")]
)
def test_a_wheel_without_the_extension_runs(sdist: Path, tmp_path: Path, how: str, reason: str) -> None:
    variables = {"CMAB_KERNELS_BUILD": "0"} if how == "switched off" else {"PATH": str(Path(sys.executable).parent)}
    wheel = _build("wheel", sdist, tmp_path / "wheel", **variables)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {
        path.relative_to((ROOT / name).parent).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    } <= files
    assert {f"cmab_kernels/{name}" for name in ("py.typed", "runtime/tiles.json", "_build.json")} <= files
    assert not [name for name in files if name.endswith(".so") or not name.startswith(("cmab_kernels", "cmab_models/"))]
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert f"\nVersion: {cmab_kernels.__version__}\n" in metadata and "License-Expression: Apache-2.0" in metadata
    _check_bill(next(installed.glob("*.dist-info/sboms/cmab_kernels.spdx.json")))
    told = _run(installed, "-W", "ignore::RuntimeWarning", "-c", FAMILIES)
    assert f"from {installed}" in told and "extension False" in told
    assert f"not built: {reason}" in told and "auto = reference" in told


LINKED = r"libstdc\+\+\.so|libm\.so|libgcc_s\.so|libc\.so|libpthread\.so|ld-linux|libgomp\.so\.1$"
"""The libraries that an extension may link to: those of every manylinux machine, and libgomp, which torch brings."""


@pytest.mark.skipif(
    shutil.which("objdump") is None, reason="objdump, which shows what an extension links to, is not here"
)
def test_the_extension_links_to_what_wheels_may() -> None:
    told = subprocess.run(["objdump", "-p", load().__file__], check=True, capture_output=True, text=True).stdout
    linked = re.findall(r"NEEDED +(\S+)", told)
    assert linked and not [name for name in linked if not re.match(LINKED, name)]


@pytest.mark.nightly
def test_a_wheel_with_the_extension_runs_the_examples(sdist: Path, tmp_path: Path) -> None:
    """pip installs the wheel into its own environment, which uses torch and other dependencies from this
    environment."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no compiler on the PATH")
    wheel = _build("wheel", sdist, tmp_path / "wheel", CMAB_KERNELS_BUILD="1")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--quiet", wheel], check=True, env=_outside())
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    without_compiler = {**_outside(), "PATH": str(python.parent)}
    told = subprocess.run(
        [python, "-c", FAMILIES], cwd=tmp_path, env=without_compiler, check=True, capture_output=True, text=True
    ).stdout
    assert f"from {packages}" in told and "extension True" in told
    for example in sorted((ROOT / "python" / "examples").glob("*.py")):
        program = shutil.copy(example, tmp_path)
        subprocess.run([python, program], cwd=tmp_path, env=_outside(), check=True, capture_output=True, timeout=300)
