"""`wflmc reproduce`: figures, tables and claims, each written as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wflmc import report, studies
from wflmc.data import Features, cache_folder, fetch_mnist, load_mnist, mnist_features
from wflmc.errors import InputError
from wflmc.keys import host_generator
from wflmc.posterior import GaussianPosterior, gaussian_regression
from wflmc.progress import ProgressBar
from wflmc.scenario import load_data, to_json
from wflmc.storage import output_folder, writable_folder, write_text

PAPER = (*studies.NAMES, "fig6", "fig7", "fig8")
EXTRA = ("heterogeneity", "record", "beyond")
EXPERIMENTS = {"fig6": 100, "fig7": 100, "fig8": 50, "heterogeneity": 10, "record": 10, "beyond": 10}
WITH_MNIST = {"fig8", "heterogeneity", "beyond"}
WITHOUT_GAUSSIAN = {"fig8", "heterogeneity"}


Run = Callable[[studies.Study], studies.Tables]
"""From a study to its tables."""


class Request(NamedTuple):
    """What was asked for."""

    figures: list[str]
    out: str
    data: list[str]
    experiments: int | None
    stop_se: float | None
    cache: str | None
    memory: float | None
    engine: str = "local"
    workers: int | None = None


class Result(NamedTuple):
    """What was made: the JSON document, the claims, and the pictures."""

    document: dict[str, Any]
    claims: list[studies.Claim]
    files: list[Path]


def reproduce_command(request: Request, bar: ProgressBar, say: Callable[[str], None]) -> Result:
    """Figures and claims; whatever is finished when it is interrupted stays."""
    with output_folder(request.out) as folder:
        return _reproduced(request, folder, bar, say)


def _reproduced(request: Request, folder: Path, bar: ProgressBar, say: Callable[[str], None]) -> Result:
    wanted = _wanted(request.figures)
    if request.stop_se is not None and not 0 < request.stop_se < 1:
        raise InputError("--stop-se", request.stop_se, "between 0 and 1, a share of the value")
    if request.stop_se is not None and {"fig6", "fig7"} & set(wanted):
        say("--stop-se is for fig8 and heterogeneity; fig6 and fig7 estimate from all experiments together.")
    files, folders = _sources(request.data)
    gaussian = _gaussian(files) if set(wanted) - WITHOUT_GAUSSIAN else None
    features = _mnist(folders, say) if WITH_MNIST & set(wanted) else None
    cache = writable_folder(request.cache, "--cache") if request.cache else cache_folder() / "studies"
    source = Path(files[0]).name if files else "synthetic data"
    if files and gaussian is None:
        say(f"--data {files[0]} is for figures 2 to 7 and not used.")
    if folders and features is None:
        say(f"--data {folders[0]} is for fig8 and heterogeneity and not used.")
    if request.experiments is not None and request.experiments < 1:
        raise InputError("--experiments", request.experiments, "at least 1")
    with studies.open_engine(request.engine, request.workers, say) as engine:

        def run(study: studies.Study) -> studies.Tables:
            with bar(study.name, len(study.points)) as advance:
                return studies.run_study(study, cache, advance, say, engine)

        pictures, tables = _figures(wanted, request, gaussian, features, source, folder, run, bar)
    claims = studies.claims(studies.Setting(gaussian)) if gaussian and set(wanted) & set(studies.NAMES) else []
    claims += studies.measured_claims(tables, gaussian)
    few = {name for name in EXPERIMENTS if (request.experiments or EXPERIMENTS[name]) < EXPERIMENTS[name] / 2}
    claims = [_of_few(claim, request.experiments) if claim.figure in few else claim for claim in claims]
    plain = [{**claim._asdict(), "data": "MNIST" if claim.figure == "fig8" else source} for claim in claims]
    used = [name for name, there in ((source, gaussian), ("MNIST", features)) if there is not None]
    # Claims of other figures in the same folder stay.
    others = [claim for claim in _earlier(folder / "claims.json") if claim["figure"] not in {c.figure for c in claims}]
    write_text(folder / "claims.json", to_json({"data": ", ".join(used), "claims": [*others, *plain]}))
    tables_written = [folder / f"{name}.csv" for name in (*(n for n in wanted if n in studies.NAMES), *tables)]
    written = [str(path) for path in (*pictures, *tables_written, folder / "claims.json")]
    return Result({"figures": wanted, "files": written, "claims": plain}, claims, pictures)


def _figures(
    wanted: Sequence[str],
    request: Request,
    gaussian: GaussianPosterior | None,
    features: Features | None,
    source: str,
    folder: Path,
    run: Run,
    bar: ProgressBar,
) -> tuple[list[Path], studies.Tables]:
    """Every figure's pictures and tables, each written as soon as it is there."""
    pictures: list[Path] = []
    tables: studies.Tables = {}
    for name in wanted:
        if name in studies.NAMES:
            pictures += _closed_form(name, gaussian, source, folder, bar)
            continue
        if name == "beyond":
            made, found = _beyond(request, gaussian, features, source, folder, run)
        elif name == "record":
            made, found = _record(gaussian, request.experiments, source, folder, bar)
        else:
            study, about = _study(name, request, gaussian, features, source)
            found = run(study)
            for table, rows in found.items():
                report.write_csv(folder / f"{table}.csv", rows)
            made = report.draw_panels(name, found, about, folder / f"{name}.png")
        pictures += made
        tables.update(found)
    return pictures, tables


def _of_few(claim: studies.Claim, experiments: int | None) -> studies.Claim:
    return claim._replace(note=f"{claim.note}; only {experiments} experiments, which may not decide it")


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The claims that an earlier run has left in the folder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["claims"]
        return [claim for claim in found if isinstance(claim["figure"], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _wanted(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in (*PAPER, *EXTRA, "all"):
            raise InputError("figure", name, f"one of {', '.join((*PAPER, *EXTRA))} or all")
    chosen = [figure for name in names for figure in (PAPER if name == "all" else (name,))]
    return list(dict.fromkeys(chosen))


def _sources(data: Sequence[str]) -> tuple[list[str], list[str]]:
    """The data file for figures 2 to 7, and the folder of MNIST; at most one of each."""
    paths = [os.path.expanduser(path) for path in data]
    folders = [path for path in paths if os.path.isdir(path)]
    files = [path for path in paths if not os.path.isdir(path)]
    if len(files) > 1 or len(folders) > 1:
        raise InputError("--data", list(data), "at most one .npz or .csv file and one folder of MNIST")
    return files, folders


def _gaussian(files: Sequence[str]) -> GaussianPosterior:
    """The paper's 30 devices with synthetic data, or with a file's in file order."""
    try:
        found = load_data(files[0]) if files else None
        X, y = (None, None) if found is None else (found.X, found.y)
        return gaussian_regression(jax.random.key(0), devices=30, X=X, y=y, partition="blocks")
    except InputError as error:
        if error.key == "devices":
            raise InputError("--data", files[0], "a data set of at least 30 examples, one for each device") from None
        raise InputError("--data", error.given, error.allowed) from None


def _mnist(folders: Sequence[str], say: Callable[[str], None]) -> Features:
    """MNIST from the folder given, else from where it is kept, else fetched."""
    try:
        images = load_mnist(folders[0] if folders else None)
    except InputError as error:
        if folders or os.environ.get("WFLMC_DATA") or error.given != "mnist":
            raise InputError("--data", error.given, error.allowed) from None
        say("MNIST is not here yet; fetching it.")
        fetch_mnist(say=say)
        images = load_mnist()
    return mnist_features(images, host_generator(jax.random.key(0), "data"))


def _closed_form(
    name: str, posterior: GaussianPosterior | None, source: str, folder: Path, bar: ProgressBar
) -> list[Path]:
    setting = studies.Setting(posterior)
    points, rows = studies.points(name, setting), []
    with bar(name, len(points)) as advance:
        for done, x in enumerate(points, 1):
            rows += studies.point(name, setting, float(x))
            advance(done)
    report.write_csv(folder / f"{name}.csv", rows)
    return report.draw_figure(name, setting, rows, source, folder / f"{name}.png")


def _record(
    posterior: GaussianPosterior | None, channels: int | None, source: str, folder: Path, bar: ProgressBar
) -> tuple[list[Path], studies.Tables]:
    setting = studies.RecordSetting(posterior, channels=channels or EXPERIMENTS["record"])
    with bar("record", len(studies.EPSILONS)) as advance:
        found = studies.record_study(setting, advance)
    for table, rows in found.items():
        report.write_csv(folder / f"{table}.csv", rows)
    about = f"{source}; {setting.snr_db:g} dB, S = 100, {setting.channels} channels"
    return report.draw_record(found, about, folder / "record.png"), found


def _beyond(
    request: Request,
    gaussian: GaussianPosterior | None,
    features: Features | None,
    source: str,
    folder: Path,
    run: Run,
) -> tuple[list[Path], studies.Tables]:
    """The paper's schemes and ours on the grounds of figures 6 and 8, and what each ingredient buys."""
    assert features is not None
    count = request.experiments or EXPERIMENTS["beyond"]
    linear = studies.beyond_gaussian(studies.BeyondGaussian(gaussian, channels=min(count, 5)))
    mnist = studies.BeyondMnist(features, experiments=count, memory=request.memory)
    found: studies.Tables = {}
    for study in (linear, studies.beyond_mnist(mnist), studies.beyond_ablation(mnist)):
        found |= run(study)
    for table, rows in found.items():
        report.write_csv(folder / f"{table}.csv", rows)
    about = (
        f"left: {source}, ε = 15, δ = 0.01 (replace); middle and right: MNIST, {count} experiment{'s' * (count > 1)}"
    )
    drawn = report.draw_panels("beyond", found, about, folder / "beyond.png")
    write_text(folder / "ablation.md", report.ablation(found))
    return [*drawn, folder / "ablation.md"], found


def _study(
    name: str, request: Request, gaussian: GaussianPosterior | None, features: Features | None, source: str
) -> tuple[studies.Study, str]:
    """A measured figure as work to do, and the line under its title."""
    count = request.experiments or EXPERIMENTS[name]
    if features is not None and name in ("fig8", "heterogeneity"):
        mnist = studies.Mnist(features, experiments=count, stop_se=request.stop_se, memory=request.memory)
        about = f"12,000 images on 30 devices; ε = {mnist.epsilon:g}, δ = {mnist.delta:g} (replace), 550 + 50 rounds"
        make = studies.mnist_study if name == "fig8" else studies.heterogeneity_study
        most = "up to " if request.stop_se is not None else ""
        return make(mnist), f"{about}, {most}{count} experiments"
    setting = studies.MultiSample(gaussian, experiments=count, memory=request.memory)
    about = (
        f"{source}; ε = {setting.epsilon:g}, δ = {setting.delta:g} (replace), S = {setting.rounds}, {count} experiments"
    )
    return studies.multi_sample_study(name, setting), about
