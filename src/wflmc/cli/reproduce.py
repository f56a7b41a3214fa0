"""`wflmc reproduce`: the paper's figures, and what it states about them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wflmc.cli import shared
from wflmc.cli.shared import note, option
from wflmc.support.errors import InputError, renamed_keys, unknown
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder, write_text

if TYPE_CHECKING:
    from wflmc.apps.studies.engines import Engine
    from wflmc.apps.studies.reproduction import Reproduction
    from wflmc.apps.studies.study import Tables
    from wflmc.support.trees import JsonObject

FIGURES = (
    "fig2 fig3a fig3b fig4a fig4b fig5 fig6 fig7 fig8, or all of them; also "
    "heterogeneity, record, beyond, league, and league-posterior: the same with "
    "unclipped chains, for an accelerator."
)
DATA = (
    ".npz or .csv with X and y for figures 2 to 7 (else synthetic); a folder of "
    "MNIST's idx files for fig8 (else WFLMC_DATA, else fetched). May repeat."
)
EXPERIMENTS = (
    "By default 100 for fig6 and fig7, 50 for fig8, 10 for heterogeneity, record, 3 "
    "for league."
)
STOP_SE = (
    "Stop a point of fig8 or heterogeneity once every scheme's ECE has a standard "
    "error below this share of it."
)


def command(
    figures: Annotated[list[str] | None, typer.Argument(help=FIGURES)] = None,
    out: Annotated[
        str, option("DIR", "Folder for tables and pictures.")
    ] = "out/reproduce",
    data: Annotated[list[str] | None, option("PATH", DATA)] = None,
    experiments: Annotated[int | None, option("N", EXPERIMENTS)] = None,
    stop_se: Annotated[float | None, option("SHARE", STOP_SE)] = None,
    cache: shared.Cache = None,
    memory: shared.Memory = None,
    engine: shared.EngineName = "local",
    workers: shared.Workers = None,
    as_json: shared.AsJson = False,
) -> None:
    """Reproduce the paper's figures, and check what it states about them.

    Finished points are cached: a command that was stopped continues where it stopped.

    Example: wflmc reproduce fig6 fig7 --experiments 20 --out results
    """
    from wflmc.apps.report import text
    from wflmc.apps.studies.engines import open_engine
    from wflmc.apps.studies.reproduction import Reproduction, read_data

    shared.cache_compilations()
    with output_folder(out) as folder:
        figure_names = _figure_names(figures or ["all"])
        if stop_se is not None and not 0 < stop_se < 1:
            requirement = "between 0 and 1, a share of the value"
            raise InputError("--stop-se", stop_se, requirement)
        if experiments is not None and experiments < 1:
            raise InputError("--experiments", experiments, "at least 1")
        paths = [Path(path).expanduser() for path in data or []]
        with renamed_keys({"data": "--data"}):
            figure_data = read_data(paths, figure_names, note)
        max_bytes = shared.parse_bytes(memory)
        work = Reproduction(*figure_data, experiments, stop_se, max_bytes)
        finished = shared.points_folder(cache)
        with open_engine(engine, workers, note) as compute:
            pictures, tables = _run_figures(
                work, figure_names, folder=folder, finished=finished, compute=compute
            )
        claims = [
            claim._replace(data="MNIST" if claim.figure == "fig8" else work.source)
            for claim in work.claims(tables)
        ]
        claim_documents = [claim._asdict() for claim in claims]
        claims_file = folder / "claims.json"
        _write_claims(claims_file, claim_documents, _sources(work))
    if as_json:
        table_files = [folder / f"{table}.csv" for table in tables]
        files = [*pictures, *table_files, claims_file]
        document = {
            "figures": figure_names,
            "files": [str(path) for path in files],
            "claims": claim_documents,
        }
        shared.print_json(document)
        return
    if claims:
        shared.show(text.claims_table(claims))
    print("Pictures:")
    for path in pictures:
        print(f"  {path}")
    print(f"Claims: {Path(out) / 'claims.json'}")


def _run_figures(
    work: "Reproduction",
    figures: Sequence[str],
    *,
    folder: Path,
    finished: Path,
    compute: "Engine",
) -> "tuple[list[Path], Tables]":
    """Run the studies of some figures, and write their pictures and tables.

    Args:
        work: makes the studies.
        figures: names.
        folder: to write to.
        finished: the folder for finished points.
        compute: the engine.

    Returns:
        The pictures, and all tables by name.
    """
    from wflmc.apps.report import study_page
    from wflmc.apps.studies.study import run_study

    pictures: list[Path] = []
    tables: Tables = {}
    for figure in figures:
        studies, description = work.studies(figure)
        figure_tables: Tables = {}
        for study in studies:
            with progress_bar(study.name, len(study.points)) as advance:
                figure_tables |= run_study(study, finished, advance, note, compute)
        name = figure.removesuffix("-posterior")
        pictures += study_page.write_study(folder, name, figure_tables, description)
        tables |= figure_tables
    return pictures, tables


def _sources(work: "Reproduction") -> str:
    """Return the names of the data that were used."""
    sources = []
    if work.gaussian is not None:
        sources.append(work.source)
    if work.features is not None:
        sources.append("MNIST")
    return ", ".join(sources)


def _figure_names(names: Sequence[str]) -> list[str]:
    """Return the figures that the arguments name, each once."""
    from wflmc.apps.studies.reproduction import FURTHER_FIGURES, PAPER_FIGURES

    valid_names = (*PAPER_FIGURES, *FURTHER_FIGURES, "all")
    figures: list[str] = []
    for name in names:
        if name not in valid_names:
            raise unknown("figure", name, valid_names)
        figures += PAPER_FIGURES if name == "all" else (name,)
    return list(dict.fromkeys(figures))


def _write_claims(path: Path, claims: "list[JsonObject]", sources: str) -> None:
    """Write the claims; those of other figures that are in the file already stay."""
    from wflmc.scenario import to_json

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        earlier_claims: list[JsonObject] = content["claims"]
        figures = [claim["figure"] for claim in claims]
        remaining = [
            claim for claim in earlier_claims if claim["figure"] not in figures
        ]
    except (OSError, ValueError, KeyError, TypeError):
        remaining = []
    write_text(path, to_json({"data": sources, "claims": [*remaining, *claims]}))
