"""`wflmc reproduce`: the paper's figures, and what it states about them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wflmc.cli.shared import (
    AsJson,
    Cache,
    EngineName,
    Memory,
    Workers,
    cache_compilations,
    note,
    parse_bytes,
    points_folder,
    print_json,
    show,
)
from wflmc.errors import InputError
from wflmc.progress import progress_bar
from wflmc.storage import output_folder, write_text

if TYPE_CHECKING:
    from wflmc.data import Features
    from wflmc.posterior import GaussianPosterior
    from wflmc.studies import Reproduction, Tables


def command(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            help="fig2 fig3a fig3b fig4a fig4b fig5 fig6 fig7 fig8, or all of them; also heterogeneity, record, beyond."
        ),
    ] = None,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for tables and pictures.")] = "out/reproduce",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help=".npz or .csv with X and y for figures 2 to 7 (else synthetic); a folder of MNIST's idx files for "
            "fig8 (else WFLMC_DATA, else fetched). May repeat.",
        ),
    ] = None,
    experiments: Annotated[
        int | None,
        typer.Option(metavar="N", help="By default 100 for fig6 and fig7, 50 for fig8, 10 for heterogeneity, record."),
    ] = None,
    stop_se: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Stop a point of fig8 or heterogeneity as soon as the standard error of every scheme's calibration "
            "error is below this share of it.",
        ),
    ] = None,
    cache: Cache = None,
    memory: Memory = None,
    engine: EngineName = "local",
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce the paper's figures, and check what it states about them.

    Finished points are cached: a command that was stopped continues where it stopped.

    Example: wflmc reproduce fig6 fig7 --experiments 20 --out results
    """
    from wflmc import studies
    from wflmc.report.text import claims_table
    from wflmc.scenario import to_json

    cache_compilations()
    with output_folder(out) as folder:
        wanted = _wanted(figures or ["all"])
        work = _reproduction(wanted, data or [], experiments, stop_se, memory)
        finished = points_folder(cache)
        pictures: list[Path] = []
        tables: studies.Tables = {}
        with studies.open_engine(engine, workers, note) as compute:
            for figure in wanted:
                parts, about = work.studies(figure)
                found: studies.Tables = {}
                for study in parts:
                    with progress_bar(study.name, len(study.points)) as advance:
                        place = None if figure in studies.NAMES else finished
                        found |= studies.run_study(study, place, advance, note, compute)
                pictures += _write_figure(folder, figure, found, about, work)
                tables |= found
        claims = work.claims(tables)
        new = [{**claim._asdict(), "data": "MNIST" if claim.figure == "fig8" else work.source} for claim in claims]
        old = [claim for claim in _claims_in(folder) if claim["figure"] not in {claim.figure for claim in claims}]
        sources = [name for name, used in ((work.source, work.gaussian), ("MNIST", work.features)) if used is not None]
        write_text(folder / "claims.json", to_json({"data": ", ".join(sources), "claims": [*old, *new]}))
    if as_json:
        files = [*pictures, *(folder / f"{table}.csv" for table in tables), folder / "claims.json"]
        print_json({"figures": wanted, "files": [str(path) for path in files], "claims": new})
        return
    if claims:
        show(claims_table(claims))
    print("\n".join(["Pictures:", *(f"  {path}" for path in pictures), f"Claims: {Path(out) / 'claims.json'}"]))


def _wanted(names: Sequence[str]) -> list[str]:
    """Return the figures that the arguments name, each once."""
    from wflmc.studies import FURTHER_FIGURES, PAPER_FIGURES

    known = (*PAPER_FIGURES, *FURTHER_FIGURES)
    for name in names:
        if name not in (*known, "all"):
            raise InputError("figure", name, f"one of {', '.join(known)} or all")
    return list(dict.fromkeys(figure for name in names for figure in (PAPER_FIGURES if name == "all" else (name,))))


def _reproduction(
    wanted: Sequence[str], data: Sequence[str], experiments: int | None, stop_se: float | None, memory: str | None
) -> Reproduction:
    """Check the options and load the data that the wanted figures need."""
    from wflmc.studies import GAUSSIAN_FIGURES, MNIST_FIGURES, Reproduction

    if stop_se is not None and not 0 < stop_se < 1:
        raise InputError("--stop-se", stop_se, "between 0 and 1, a share of the value")
    if experiments is not None and experiments < 1:
        raise InputError("--experiments", experiments, "at least 1")
    paths = [Path(path).expanduser() for path in data]
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if len(files) > 1 or len(folders) > 1:
        raise InputError("--data", list(data), "at most one .npz or .csv file and one folder of MNIST")
    gaussian, mnist = GAUSSIAN_FIGURES & set(wanted), MNIST_FIGURES & set(wanted)
    if stop_se is not None and {"fig6", "fig7"} & set(wanted):
        note("--stop-se is for fig8 and heterogeneity; fig6 and fig7 estimate from all experiments together.")
    if files and not gaussian:
        note(f"--data {files[0]} is for figures 2 to 7 and not used.")
    if folders and not mnist:
        note(f"--data {folders[0]} is for fig8 and heterogeneity and not used.")
    return Reproduction(
        gaussian=_gaussian(files[0] if files else None) if gaussian else None,
        source=files[0].name if files else "synthetic data",
        features=_mnist(folders[0] if folders else None) if mnist else None,
        experiments=experiments,
        stop_se=stop_se,
        memory=parse_bytes(memory),
    )


def _gaussian(file: Path | None) -> GaussianPosterior:
    """Return the paper's posterior of 30 devices, with synthetic data or a file's in file order."""
    import jax

    from wflmc.posterior import gaussian_regression
    from wflmc.scenario import load_data

    try:
        found = None if file is None else load_data(file)
        X, y = (None, None) if found is None else (found.X, found.y)
        return gaussian_regression(jax.random.key(0), devices=30, X=X, y=y, partition="blocks")
    except InputError as error:
        if error.key == "devices":
            raise InputError("--data", str(file), "a data set of at least 30 examples, one for each device") from None
        raise InputError("--data", error.given, error.allowed) from None


def _mnist(folder: Path | None) -> Features:
    """Return MNIST from the folder given, else from where it is kept, else fetched."""
    import jax

    from wflmc.data import fetch_mnist, load_mnist, mnist_features
    from wflmc.keys import host_generator

    try:
        images = load_mnist(folder)
    except InputError as error:
        if folder or os.environ.get("WFLMC_DATA") or error.given != "mnist":
            raise InputError("--data", error.given, error.allowed) from None
        note("MNIST is not here yet; fetching it.")
        fetch_mnist(say=note)
        images = load_mnist()
    return mnist_features(images, host_generator(jax.random.key(0), "data"))


def _write_figure(folder: Path, figure: str, tables: Tables, about: str, work: Reproduction) -> list[Path]:
    """Write the tables of a figure and draw it; return the pictures."""
    from wflmc.report import study_page, text
    from wflmc.report import tables as csv_tables
    from wflmc.studies import NAMES

    for table, rows in tables.items():
        csv_tables.write_csv(folder / f"{table}.csv", rows)
    picture = folder / f"{figure}.png"
    if figure in NAMES:
        return study_page.draw_closed_form(figure, work.closed_form, tables[figure], about, picture)
    written = study_page.draw_study(figure, tables, about, picture)
    if figure == "beyond":
        write_text(folder / "ablation.md", text.ablation(tables))
        written = [*written, folder / "ablation.md"]
    return written


def _claims_in(folder: Path) -> list[dict[str, Any]]:
    """Return the claims that an earlier command has left in the folder, where those of other figures stay."""
    try:
        found = json.loads((folder / "claims.json").read_text(encoding="utf-8"))["claims"]
        return [claim for claim in found if isinstance(claim["figure"], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
