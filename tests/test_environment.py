"""One list of versions: what conda, pip and the package itself ask for cannot drift apart. And what costs no import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sinks

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "matplotlib", "datasets")


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """What a file of pins asks for, and the hashes of each; a package has several pins where Pythons differ."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    parts = [line.split("--hash=sha256:") for line in lines]
    return [(Requirement(pin), [digest.strip() for digest in hashes]) for pin, *hashes in parts]


def pins() -> dict[str, str]:
    """Package -> exact version, of what pyproject.toml names."""
    return {
        pin.name: str(pin.specifier).removeprefix("==") for pin, _ in locked("requirements.txt") if pin.name in asked()
    }


def asked() -> dict[str, Requirement]:
    extras = project()["optional-dependencies"].values()
    names = [*project()["dependencies"], *(name for extra in extras for name in extra)]
    return {requirement.name: requirement for requirement in map(Requirement, names)}


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
    assert set(asked()) == set(pins())
    assert [name for name, pin in pins().items() if pin not in asked()[name].specifier] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements*.txt")), ids=lambda path: path.stem)
def test_every_pin_is_exact_and_hashed(path: Path) -> None:
    for pin, hashes in locked(path.name):
        assert re.fullmatch(r"==[\w.+]+", str(pin.specifier)), pin
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes), pin
    assert "://" not in path.read_text(encoding="utf-8")  # which index pip asks is not ours to say


def test_what_only_the_cuda_build_needs_is_apart() -> None:
    names = {file: {pin.name for pin, _ in locked(f"{file}.txt")} for file in ("requirements", "requirements-cuda")}
    cuda = re.compile("(nvidia|cuda)-.*|triton")
    assert [name for name in names["requirements"] if cuda.fullmatch(name)] == []
    assert {name for name in names["requirements-cuda"] if not cuda.fullmatch(name)} <= names["requirements"]


def test_torch_has_one_version() -> None:
    [(build, _)] = locked("requirements-cpu.txt")
    assert str(build.specifier) == f"=={pins()['torch']}+cpu"


def test_nothing_that_a_package_needs_lacks_a_pin() -> None:
    """The installed packages tell what they need; a hash of each is in the files."""
    names = {canonicalize_name(pin.name) for pin, _ in locked("requirements.txt")}
    lacking: set[str] = set()
    for name in names:
        try:
            needs = [Requirement(need) for need in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # of another platform
            continue
        wanted = {
            canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
        }
        lacking |= wanted - names - {canonicalize_name(pin.name) for pin, _ in locked("requirements-cuda.txt")}
    assert lacking == set()


def test_the_makefile_installs_only_what_is_hashed() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"pip install.*", text) == ["pip install --disable-pip-version-check --no-deps"]
    calls = re.findall(r"\$\(INSTALL\) ([^|;\n]*)", text)
    assert [call for call in calls if "--require-hashes" not in call] == ["--no-build-isolation -e ."]


def in_a_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("modules", ["sinks", "sinks, sinks.runs", "sinks.report, sinks.statistics, sinks.summary"])
def test_reading_a_run_imports_nothing_heavy(modules: str) -> None:
    code = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    assert in_a_fresh_interpreter(code) == "[]"


def test_all_names_of_the_package_are_there() -> None:
    assert dir(sinks) == sorted(sinks.__all__)
    assert (
        in_a_fresh_interpreter(f"from sinks import *; print(all(map(callable, [{', '.join(sinks.__all__)}])))")
        == "True"
    )
    with pytest.raises(AttributeError, match="module 'sinks' has no attribute 'nothing'"):
        _ = sinks.nothing


WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "lm_eval"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "missing", "extra"), [("plots_creation.py", "matplotlib", "plots"), ("eval_llada.py", "lm_eval", "eval")]
)
def test_a_missing_extra_is_named(script: str, missing: str, extra: str) -> None:
    call = [sys.executable, "-c", WITHOUT, str(ROOT / script)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: {missing} is not installed; pip install 'dlms-sinks[{extra}]'\n"
