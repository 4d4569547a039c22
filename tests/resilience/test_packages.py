"""Detection of installed packages."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_moe.config.imports import installed_version
from megatron_moe.resilience.packages import (
    CONSTRAINTS,
    HOW_TO_BUILD,
    PACKAGES,
    Package,
    find_all,
    find_package,
    pinned_versions,
    summary,
)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """First folder of the module search path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def install(site: Path, name: str, module: str, version: str, *inside: str) -> None:
    """Creates an installed distribution, as pip does."""
    for folder in ("", *inside):
        (site / module / folder).mkdir(parents=True, exist_ok=True)
        (site / module / folder / "__init__.py").write_text("raise AssertionError('never imported')\n")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def package(name: str) -> Package:
    return next(each for each in PACKAGES if each.name == name)


@pytest.mark.parametrize(
    ("name", "module", "version", "inside", "problem"),
    [
        ("apex", "apex", "0.9.10.dev0", ("lib", "ext"), "an unrelated package of that name"),
        ("apex", "apex", "0.1", ("multi_tensor_apply", "optimizers"), ""),
        ("deep-ep", "deep_ep", "1.0.0", (), "an obsolete release from the package index"),
        ("deep-ep", "deep_ep", "1.2.1+9af0e0d", (), ""),
    ],
)
def test_unrelated_and_obsolete_packages_of_the_index_are_detected(site, name, module, version, inside, problem):
    install(site, name, module, version, *inside)
    found = find_package(package(name), {})
    assert (found.verdict, found.version) == ("wrong" if problem else "untested", version)
    assert problem in found.problem
    assert any(line.startswith(f"warning: the installed {name}") for line in summary([found])) == bool(problem)


def test_versions_are_compared_without_local_part(site):
    install(site, "fla-core", "fla", "0.4.0+cu130")
    assert find_package(package("fla-core"), {"fla-core": "0.4.0"}).verdict == "tested"
    other = find_package(package("fla-core"), {"fla-core": "0.5.0"})
    assert other.verdict == "other version"
    assert summary([other])[-1] == "other versions than the tested ones (in brackets): fla-core 0.4.0+cu130 (0.5.0)"


def test_missing_package_is_not_in_the_summary():
    absent = Package("no-such-thing", "no_such_thing", "")
    found = find_package(absent, {})
    assert found.verdict == "missing" and summary([found]) == ["packages: "]


def test_this_environment():
    pins = pinned_versions(CONSTRAINTS)
    assert {each.name for each in PACKAGES if each.required} <= pins.keys()
    assert pinned_versions(Path("no/such/file")) == {}
    found = {each.package.name: each for each in find_all()}
    assert all(each.version for each in found.values() if each.package.required)
    assert summary(found.values())[0].startswith(f"packages: torch {found['torch'].version}")
    assert set(HOW_TO_BUILD) == {each.name for each in PACKAGES if each.install == "built from source"}


def test_versions_are_those_of_the_metadata():
    found = {name: installed_version(name) for name in ("torch", "numpy", "pytest", "no-such-package")}
    assert found == {**{name: metadata.version(name) for name in ("torch", "numpy", "pytest")}, "no-such-package": None}
