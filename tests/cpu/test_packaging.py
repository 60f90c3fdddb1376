"""The wheel and the sdist hold all that is needed, and work in an environment that has nothing else."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(8, 8),)
"""


def data_files() -> list[str]:
    """What the package holds besides Python."""
    found = (p for p in (ROOT / "autopar").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted(str(p.relative_to(ROOT)) for p in found if p.suffix != ".py")


def test_every_file_that_is_no_python_is_declared_as_data():
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{p}" for package, each in declared.items() for p in each]
    assert [f for f in data_files() if not any(fnmatch.fnmatch(f, p) for p in patterns)] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheel_and_sdist_are_built_and_work_in_an_empty_environment(tmp_path: Path):
    import torch

    def run(*command: object, **options) -> str:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run([*map(str, pip), "build"], capture_output=True).returncode != 0:
        pytest.skip("pip reaches no index from which to install what autopar depends on")
    run("git", "clone", "-q", ROOT, tmp_path / "clone")
    run(python, "-m", "build", "--outdir", tmp_path / "dist", tmp_path / "clone")
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    assert set(data_files()) <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    assert {*data_files(), "LICENSE", "README.md", "pyproject.toml"} <= held

    run(*pip, f"torch=={torch.__version__.split('+')[0]}")  # pinned: an open range may fetch gigabytes
    (tmp_path / "mine.py").write_text(MODEL)
    for package in (wheel, sdist):
        run(*pip, "--force-reinstall", "--no-deps", package)
        run(*pip, package)  # what it depends on
        autopar = tmp_path / "env" / "bin" / "autopar"
        assert "computes what the model computes" in run(autopar, "check", cwd=tmp_path)
        asked = ["--mesh", "2x2", "--cluster", "dgx-h100", "--report", "plan.html", "--output", "plan.json"]
        assert "step time" in run(autopar, "plan", "mine:small", *asked, cwd=tmp_path)
        assert (tmp_path / "plan.html").stat().st_size > 20_000
        assert "/clone/" not in run(python, "-c", "import autopar; print(autopar.__file__)", cwd=tmp_path)
