"""What a release needs: version, tag and changelog agree, and the metadata is complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import headtilt

ROOT = Path(__file__).parent.parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?")


def released(changelog: str) -> list[str]:
    """Return the versions that a changelog has a section for, newest first."""
    return re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)


def disagreement(version: str, changelog: str, tags: list[str]) -> str | None:
    """Return what is wrong between a version, the changelog and the tags of this commit; None where nothing is."""
    newest = next(iter(released(changelog)), None)
    if ".dev" in version:
        if "## [Unreleased]" not in changelog:
            return "a development version needs a section Unreleased"
        if tags:
            return f"{tags} stands on a development version"
        return f"{version} has been released already" if version.partition(".dev")[0] in released(changelog) else None
    if newest != version:
        return f"the version is {version}, and the changelog's newest is {newest}"
    return None if tags in ([], [f"v{version}"]) else f"the version is {version}, and the tag is {tags}"


def test_version_tag_and_changelog_agree():
    done = subprocess.run(
        ["git", "tag", "--points-at", "HEAD", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert VERSION.fullmatch(headtilt.__version__)
    assert disagreement(headtilt.__version__, CHANGELOG, done.stdout.split()) is None


@pytest.mark.parametrize(
    ("version", "changelog", "tags"),
    [
        ("1.0.0.dev0", "## [1.0.0]", []),
        ("1.0.0.dev0", "## [Unreleased]\n\n## [1.0.0]", []),
        ("1.0.0.dev0", "## [Unreleased]", ["v1.0.0"]),
        ("1.0.0", "## [Unreleased]\n\n## [0.9.0]", []),
        ("1.0.0", "## [1.0.0]\n", ["v1.1.0"]),
    ],
)
def test_a_disagreement_would_be_seen(version, changelog, tags):
    assert disagreement(version, changelog, tags) is not None
    assert disagreement("1.0.0", "## [Unreleased]\n\n## [1.0.0] - 2026-01-01", ["v1.0.0"]) is None


def test_the_declared_pythons_are_those_of_the_classifiers_and_of_the_linter():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert named == ["3.10", "3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.10"' in PROJECT
    assert 'target-version = "py310"' in PROJECT


def test_the_metadata_has_links_licence_and_readme():
    for line in ('readme = "README.md"', 'license = "Apache-2.0"', "[project.urls]", 'license-files = ["LICENSE"]'):
        assert line in PROJECT


def test_every_dependency_has_a_lower_bound_and_no_upper_one():
    listed = PROJECT.partition("\ndependencies")[2].partition("[project.scripts]")[0]
    wanted = [one for one in re.findall(r'"([^"]+)"', listed) if not one.startswith("headtilt[")]
    assert len(wanted) > 20
    assert [one for one in wanted if not re.match(r"[\w.-]+(\[\w+\])?>=[\d.]+($|;)", one)] == []


def test_files_of_weights_in_the_package_are_all_safetensors():
    packaged = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in packaged} <= {".py", ".typed", ".safetensors", ".json"}
    assert sum(path.stat().st_size for path in packaged) < 5_000_000
