"""Shared fixtures: the paper's setting, the authors' data where present, and how large
a test may be.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

import wflmc
from wflmc import channel
from wflmc.cli import main
from wflmc.data import sets as data
from wflmc.planning import build

from . import CACHE, GPU
from .cli_tools import STATIC, only_warnings, strict

FULL = os.environ.get("WFLMC_FULL") == "1"

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("full", derandomize=True, deadline=None, max_examples=400)
settings.load_profile("full" if FULL else "quick")

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
PAPER_DATA = SHARED_DATA / "gaussian_paper.npz"


NEEDED = {
    "make test-full": "large counts: `make test-full` runs them",
    "authors' data": "the authors' data not found: put gaussian_paper.npz into ../shared/data",
    "MNIST": "MNIST not found: `wflmc data mnist` fetches it; then WFLMC_DATA=FOLDER make test",
    "Chromium": "no browser found: `make browser` installs Chromium",
    "no GPU": "no GPU used: WFLMC_GPU=1 make test",
    "pip install": "an optional package not found: the reason names it (-rs lists them)",
}
"""Words in the reason of a skipped test, with what is missing and how to get it."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `gpu`."""
    config.addinivalue_line(
        "markers", "gpu: needs an accelerator; all other tests run on the CPU"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle files, and tests within each file, where WFLMC_ORDER gives a seed; skip
    what needs a GPU without one.
    """
    seed = os.environ.get("WFLMC_ORDER")
    if seed:
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[item.path].append(item)
        shuffled = list(files.values())
        chance = random.Random(int(seed))
        chance.shuffle(shuffled)
        for group in shuffled:
            chance.shuffle(group)
        items[:] = [item for group in shuffled for item in group]
    accelerated = GPU and jax.default_backend() != "cpu"
    for item in items:
        if item.get_closest_marker("gpu") and not accelerated:
            item.add_marker(
                pytest.mark.skip(reason="no GPU: WFLMC_GPU=1 where JAX sees one")
            )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped and how to enable it."""
    reasons = [
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    ]
    needs = Counter(
        next((remedy for word, remedy in NEEDED.items() if word in reason), reason)
        for reason in reasons
    )
    for remedy, number in needs.items():
        terminalreporter.write_line(f"{number} skipped: {remedy}.")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of compiled code that `tests/__init__.py` has made."""
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


def count(quick: int, full: int) -> int:
    """Return how many cases to run: `quick` in `make test`, `full` in `make test-
    full`.
    """
    return full if FULL else quick


@pytest.fixture(scope="session")
def posterior():
    """The paper's synthetic setting."""
    return wflmc.gaussian_regression(jax.random.key(0), devices=30)


@pytest.fixture(scope="session")
def small():
    """A small, uneven problem: 5 devices, 3 parameters, sorted labels."""
    return wflmc.gaussian_regression(
        jax.random.key(1), devices=5, examples=43, dim=3, partition="by-label"
    )


@pytest.fixture(scope="session")
def paper_data() -> Path:
    """The file of the authors' data; tests of it are skipped without."""
    if not PAPER_DATA.exists():
        pytest.skip("the paper authors' data set is not in ../shared/data")
    return PAPER_DATA


@pytest.fixture(scope="session")
def paper_posterior(paper_data):
    """The authors' data on 30 devices, in the order of the file."""
    arrays = np.load(paper_data)
    return wflmc.gaussian_regression(
        jax.random.key(0), devices=30, X=arrays["X"], y=arrays["y"], partition="blocks"
    )


NO_MNIST = "MNIST is not in ../shared/data, and WFLMC_DATA does not say where it is"


def find_mnist_folder() -> Path | None:
    """Return the folder that WFLMC_DATA names, else the one beside this checkout; None
    where there is none.
    """
    folder = Path(os.environ.get(data.VARIABLE) or SHARED_DATA / "mnist").absolute()
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The folder with MNIST; tests of it are skipped without."""
    folder = find_mnist_folder()
    if folder is None:
        pytest.skip(NO_MNIST)
    return folder


@pytest.fixture(scope="session")
def mnist_features(mnist_folder):
    """The paper's 12,000 images on 30 principal directions."""
    return data.mnist_features(
        data.load("mnist", mnist_folder), np.random.default_rng(0)
    )


@pytest.fixture
def scenario(tmp_path):
    """The path of a scenario file with static channels, where every device always
    sends.
    """
    path = tmp_path / "scenario.toml"
    path.write_text(STATIC)
    return path


@pytest.fixture
def call(capsys, monkeypatch):
    """A function that runs `wflmc` with these arguments in this process: (exit code,
    stdout, stderr).
    """

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["wflmc", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return run


@pytest.fixture
def plans_made(monkeypatch):
    """A function that returns how many plans have been drafted since the fixture was
    set up.
    """
    drafted = []
    draft = build._Planning.draft

    def counting(planning, *arguments, **keywords):
        drafted.append(planning)
        return draft(planning, *arguments, **keywords)

    monkeypatch.setattr(build._Planning, "draft", counting)
    return lambda: len(drafted)


@pytest.fixture
def plan_of(call):
    """A function that runs `wflmc plan` with these arguments and returns its JSON;
    nothing but warnings on stderr.
    """

    def run(*arguments):
        code, out, err = call("plan", *arguments, "--no-advice", "--json")
        assert code == 0, err
        assert only_warnings(err)
        document = strict(out)
        assert err.count("\n") == len(document["warnings"])
        return document

    return run


@pytest.fixture(scope="session")
def paid_setting():
    """A small problem with a promise that its plan uses up: posterior, link, plan."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=6, examples=120)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    step = 0.4 / (posterior.mu + posterior.L)
    return (
        posterior,
        link,
        wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(8, 0.01, 30),
            step_size=step,
            burn_in=13,
            samples=20,
        ),
    )


@pytest.fixture(scope="session")
def six_devices():
    """Six devices with ten examples each."""
    return wflmc.gaussian_regression(jax.random.key(2), devices=6, examples=60)
