"""
Runs the suite with the oldest and with the newest versions of the dependencies that pyproject.toml allows, under each
interpreter that is named.

    python tests/programs/versions.py --pythons python3.11 python3.13          # make test-versions
    python tests/programs/versions.py --ends oldest -- tests/modeling -k cache

The oldest are the lower bounds themselves; the newest what pip chooses. Each pair has a virtual environment of its own,
kept for the next time. An interpreter that is not there is skipped, and said; it is an error if nothing is left.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.places import PROGRAMS, ROOT
from helpers.suite_runs import run_suite, table

ENDS = ("oldest", "newest")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text) for text in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
]
# What a row of the table names, in its order.
DEPENDENCIES = [one.name for one in REQUIREMENTS[: len(PROJECT["dependencies"])]]


class Result(NamedTuple):
    outcome: str  # "passed", "failed" or "skipped"
    told: str  # what the suite said, or why it did not run
    versions: dict[str, str] = {}  # of Python and of the dependencies, as installed


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--pythons", nargs="+", default=["python3"], metavar="PYTHON", help="names or paths")
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=ENDS, help="which versions; both by default")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path(sys.prefix) / "versions",
        metavar="FOLDER",
        help="where the virtual environments are kept; %(default)s by default",
    )
    parser.add_argument("pytest", nargs="*", metavar="TESTS", help="for pytest, after --; the whole suite by default")
    arguments = parser.parse_args()
    pairs = [(python, end) for python in arguments.pythons for end in arguments.ends]
    results = []
    for number, (python, end) in enumerate(pairs, 1):
        print(f"[{number}/{len(pairs)}] {python}, {end} versions", flush=True)
        results.append(try_versions(python, end, arguments.environments.absolute(), arguments.pytest))
        print(f"    {results[-1].told}", flush=True)
    rows = [row(python, end, result) for (python, end), result in zip(pairs, results, strict=True)]
    print(table(["Python", "versions", *DEPENDENCIES, "tests"], rows))
    outcomes = {result.outcome for result in results}
    if outcomes == {"skipped"}:
        sys.exit("No tests ran: every interpreter was skipped.")
    sys.exit("failed" in outcomes)


def try_versions(python: str, end: str, environments: Path, tests: list[str]) -> Result:
    """Installs the package with these versions beside the others, and runs the suite there."""
    version = run([python, "-c", "import platform; print(platform.python_version())"])
    if version.returncode:
        return Result("skipped", f"skipped: {python} does not run: {first_line(version)}")
    # The micro version too: an environment is bound to the very interpreter that made it.
    folder = environments / f"{version.stdout.strip()}-{end}"
    made = run([python, "-m", "venv", folder])
    if made.returncode:
        return Result("skipped", f"skipped: {python} makes no virtual environment: {first_line(made)}")
    inside = folder / "bin" / "python"
    for command in (install(inside, end, folder), [inside, PROGRAMS / "fetch_transformers_tests.py"]):
        done = run(command)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)
            return Result("failed", "not installed, as said above")
    failed, summary = run_suite(inside, ["-n", "2", *tests])
    return Result("failed" if failed else "passed", summary, {"Python": version.stdout.strip()} | installed(inside))


def install(inside: Path, end: str, folder: Path) -> list:
    """The command that brings an environment to one end of the versions."""
    command = [inside, "-m", "pip", "install", "--progress-bar", "off", "--editable", f"{ROOT}[dev]"]
    if end == "newest":
        return [*command, "--upgrade", "--upgrade-strategy", "eager"]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lower_bounds()) + "\n", encoding="utf-8")
    return [*command, "--constraint", constraints]


def lower_bounds() -> list[str]:
    """Each dependency at its lower bound, so that a bound that names no release is an error of the installation."""
    bounds = []
    for requirement in REQUIREMENTS:
        marker = f"; {requirement.marker}" if requirement.marker else ""
        lowest = [one.version for one in requirement.specifier if one.operator == ">="]
        bounds += [f"{requirement.name}=={version}{marker}" for version in lowest]
    return bounds


def installed(inside: Path) -> dict[str, str]:
    """The versions of what is installed, by the names that pyproject.toml uses."""
    listed = json.loads(run([inside, "-m", "pip", "list", "--format", "json"]).stdout)
    versions = {canonicalize_name(one["name"]): one["version"] for one in listed}
    return {name: versions[canonicalize_name(name)] for name in DEPENDENCIES if canonicalize_name(name) in versions}


def run(command: list) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", error.strerror)


def first_line(done: subprocess.CompletedProcess) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[0] if lines else "it said nothing"


def row(python: str, end: str, result: Result) -> list[str]:
    versions = [result.versions.get(name, "") for name in DEPENDENCIES]
    return [result.versions.get("Python", python), end, *versions, result.told]


if __name__ == "__main__":
    main()
