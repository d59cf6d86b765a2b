"""One list of versions: what conda, pip and the package itself ask for cannot drift apart."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    """Package -> exact version, from requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def conda() -> dict[str, Any]:
    environment: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return environment


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_conda_and_pip_ask_for_the_same() -> None:
    assert conda()["name"] == "dlms-sinks"
    [pip] = [part["pip"] for part in conda()["dependencies"] if isinstance(part, dict)]
    assert dict(line.split("==") for line in pip) == pins()


def test_conda_pins_an_exact_python_that_the_package_accepts() -> None:
    [python] = [part for part in conda()["dependencies"] if str(part).startswith("python=")]
    exact = re.fullmatch(r"python=(3\.11\.\d+)", python)
    assert exact is not None
    assert exact[1] in Requirement(f"python{project()['requires-python']}").specifier


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = project()["optional-dependencies"].values()
    asked = [*project()["dependencies"], *(name for extra in extras for name in extra)]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, asked)}
    assert set(ranges) == set(pins())
    assert [name for name, pin in pins().items() if pin not in ranges[name]] == []


def test_the_makefile_installs_torch_and_accelerate_together() -> None:
    calls = re.findall(r"pip install .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert sum("-r requirements.txt" in call for call in calls) == 1
    assert all("--no-deps" in call or "-r requirements.txt" in call for call in calls)
    assert {"torch", "accelerate"} <= set(pins())
