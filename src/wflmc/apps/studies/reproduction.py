"""Which studies a figure consists of, from which data, and which claims follow."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax

from wflmc.apps.studies.beyond import (
    RECORD_SNR,
    beyond_ablation,
    beyond_gaussian,
    beyond_mnist,
    record_study,
)
from wflmc.apps.studies.cache import Warn
from wflmc.apps.studies.league import LEAGUE_DATA, League, league_study
from wflmc.apps.studies.paper import fig2_to_fig5, fig6_fig7, fig8
from wflmc.apps.studies.paper.fig2_to_fig5 import NAMES, Setting
from wflmc.apps.studies.study import Claim, Study, Tables
from wflmc.data.sets import (
    DATA_SETS,
    VARIABLE,
    Features,
    fetch,
    find,
    load,
    mnist_features,
)
from wflmc.posterior import GaussianPosterior, Posterior, gaussian_regression
from wflmc.scenario.files import load_data
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

PAPER_FIGURES = (*NAMES, "fig6", "fig7", "fig8")
FURTHER_FIGURES = ("heterogeneity", "record", "beyond", "league", "league-posterior")
MNIST_FIGURES = {"fig8", "heterogeneity", "beyond"}
"""Figures that are computed from the paper's features of MNIST."""
GAUSSIAN_FIGURES = {*PAPER_FIGURES, "record", "beyond"} - {"fig8"}
"""Figures that are computed from the paper's Gaussian posterior."""
EXPERIMENTS = {
    "fig6": 100,
    "fig7": 100,
    "fig8": 50,
    "heterogeneity": 10,
    "record": 10,
    "beyond": 10,
    "league": 3,
}
"""The usual number of experiments of a figure; figures in closed form have one."""
MAX_BEYOND_CHANNELS = 5
"""Channels of the Gaussian part of `beyond`, whose plans take longest."""
PAPER_DIM = 5
"""m of the paper's Gaussian posterior."""
PAPER_MU_PLUS_L = 2508
"""μ + L of the paper's Gaussian posterior."""
PAPER_TOLERANCE = 0.15
"""Relative, of μ + L of data that are taken to be of the paper's kind."""


class Inputs(NamedTuple):
    """The data of the figures."""

    gaussian: GaussianPosterior | None
    """Of figures 2 to 7, `record` and `beyond`; None where none of them is asked
    for."""
    source: str
    """The name of its data."""
    features: Features | None
    """Of MNIST; None where no figure needs them."""


def read_data(paths: list[Path], figures: list[str], note: Warn) -> Inputs:
    """Return the data that some figures need.

    MNIST and Fashion-MNIST are fetched where they are not on this machine. A folder of
    MNIST takes the place of the cache, except for the league, whose features are kept
    there. Paths that no figure needs are reported and not read.

    Args:
        paths: a file for the Gaussian posterior, by default synthetic data, and a
            folder of MNIST, by default the cache.
        figures: names of figures.
        note: called with sentences for the user.

    Returns:
        The paper's posterior of 30 devices, and features of MNIST.

    Raises:
        InputError: if there is more than one file or folder, or if one cannot be used.
    """
    files = [path for path in paths if not path.is_dir()]
    folders = [path for path in paths if path.is_dir()]
    if len(files) > 1 or len(folders) > 1:
        raise InputError(
            "data",
            [*map(str, paths)],
            "at most one .npz or .csv file and one folder of MNIST",
        )
    uses_file = bool(GAUSSIAN_FIGURES & set(figures))
    uses_mnist = bool(MNIST_FIGURES & set(figures))
    unused_files = [] if uses_file else files
    unused_folders = [] if uses_mnist else folders
    for path in [*unused_files, *unused_folders]:
        note(f"--data {path} is not used: {', '.join(figures)} have other data.")
    gaussian = None
    source = "synthetic data"
    if uses_file:
        gaussian = _paper_posterior(files)
        if files:
            source = files[0].name
    _fetch_images(_cached_data_sets(figures, bool(folders)), note)
    features = None
    if uses_mnist:
        generator = host_generator(jax.random.key(0), "data")
        features = mnist_features(load("mnist", *folders), generator)
    return Inputs(gaussian, source, features)


def _paper_posterior(files: list[Path]) -> GaussianPosterior:
    """Return the Gaussian posterior of 30 devices, of a file or of synthetic data."""
    X = None
    y = None
    if files:
        data, _ = load_data(files[0])
        X = data.X
        y = data.y
    key = jax.random.key(0)
    return gaussian_regression(key, devices=30, X=X, y=y, partition="blocks")


def _cached_data_sets(figures: list[str], has_folder: bool) -> Sequence[str]:
    """Return the names of the data sets that some figures read from the cache.

    Args:
        figures: names of figures.
        has_folder: whether figures of MNIST read a folder instead.
    """
    if any(figure.startswith("league") for figure in figures):
        private = [data.private for data in LEAGUE_DATA.values()]
        public = [name for data in LEAGUE_DATA.values() for name in data.whiten_from]
        return list(dict.fromkeys(private + public))
    uses_mnist = bool(MNIST_FIGURES & set(figures))
    return ["mnist"] if uses_mnist and not has_folder else []


def _fetch_images(names: Sequence[str], note: Warn) -> None:
    """Fetch data sets that are not on this machine.

    Where WFLMC_DATA is set, nothing is downloaded: only what is made here is made.
    """
    for name in names:
        is_download = bool(DATA_SETS[name].sha256)
        if is_download and os.environ.get(VARIABLE):
            continue
        _, missing_files = find(name)
        if missing_files:
            note(f"{DATA_SETS[name].title} is not here yet; fetching it.")
            fetch(name, report=note)


class FigureStudies(NamedTuple):
    """What a figure shows."""

    studies: list[Study]
    """The studies whose tables are in it."""
    subtitle: str
    """The line under its title."""


@dataclass(frozen=True)
class Reproduction:
    """The data of the figures, and how much is computed from them.

    Args:
        gaussian: posterior of figures 2 to 7, `record` and `beyond`; None where none of
            them is asked for.
        source: the name of its data, for titles.
        features: of MNIST, for figure 8, `heterogeneity` and `beyond`; None where none
            of them is asked for.
        experiments: instead of a figure's usual number.
        stop_se: stops a point of figure 8 or `heterogeneity` at this relative standard
            error.
        memory: limit of the sampler, in bytes.
    """

    gaussian: GaussianPosterior | None
    source: str
    features: Features | None
    experiments: int | None = None
    stop_se: float | None = None
    memory: float | None = None

    def studies(self, figure: str) -> FigureStudies:
        """Return the studies whose tables a figure shows, and the line under its title.

        Nothing is computed yet. The line names the data, the promise and the number of
        experiments.

        Args:
            figure: one of `PAPER_FIGURES` or `FURTHER_FIGURES`.
        """
        if figure in NAMES:
            return self._closed_form(figure)
        if figure in ("fig6", "fig7"):
            return self._multi_sample(figure)
        if figure.startswith("league"):
            return self._league(figure)
        if figure == "record":
            return self._record()
        if figure == "beyond":
            return self._beyond()
        return self._images(figure)

    def claims(self, tables: Tables) -> list[Claim]:
        """Return the paper's stated outcomes with our numbers.

        Claims of figures 2 to 7 are about data of the paper's kind; on other data those
        that do not hold say nothing about the paper, and are marked so. With fewer than
        half of the usual experiments a note says that they may not decide it.

        Args:
            tables: of the figures that have been computed; claims of other figures are
                left out.
        """
        claims = [*fig6_fig7.claims(tables)]
        if set(NAMES) & set(tables):
            closed_form_claims = fig2_to_fig5.claims(self._single_sample())
            claims = [*closed_form_claims, *claims]
        claims = [*_on_data(self.gaussian, claims), *fig8.claims(tables)]
        return [self._with_doubt(claim) for claim in claims]

    def _with_doubt(self, claim: Claim) -> Claim:
        """Return a claim with a note where the experiments may be too few for it."""
        usual_count = EXPERIMENTS.get(claim.figure, 0)
        if not self.experiments or self.experiments >= usual_count / 2:
            return claim
        doubt = f"; only {self.experiments} experiments, which may not decide it"
        return claim._replace(note=claim.note + doubt)

    def _count(self, figure: str) -> int:
        """Return the number of experiments of a figure."""
        usual_count = EXPERIMENTS.get(figure.removesuffix("-posterior"), 1)
        return self.experiments or usual_count

    def _single_sample(self) -> Setting:
        """Return the setting of figures 2 to 5."""
        assert self.gaussian is not None  # `read_data` has it for these figures
        return Setting(self.gaussian)

    def _chains(self, figure: str) -> fig6_fig7.MultiSample:
        """Return the setting of studies on the Gaussian posterior."""
        assert self.gaussian is not None  # `read_data` has it for these figures
        return fig6_fig7.MultiSample(
            self.gaussian, experiments=self._count(figure), memory=self.memory
        )

    def _mnist(self, figure: str) -> fig8.Mnist:
        """Return the setting of studies on MNIST."""
        assert self.features is not None  # `read_data` has them for these figures
        return fig8.Mnist(
            self.features,
            experiments=self._count(figure),
            stop_se=self.stop_se,
            memory=self.memory,
        )

    def _closed_form(self, figure: str) -> FigureStudies:
        """Return one of figures 2 to 5."""
        setting = self._single_sample()
        promise = _promise(setting)
        if figure == "fig5":
            promise = f"δ = {setting.delta:g} (replace)"  # x is ε
        study = fig2_to_fig5.closed_form_study(figure, setting)
        subtitle = f"{self.source}; {promise}, {setting.burn_in} + 1 rounds"
        return FigureStudies([study], subtitle)

    def _multi_sample(self, figure: str) -> FigureStudies:
        """Return figure 6 or 7."""
        setting = self._chains(figure)
        rounds = f"S = {setting.rounds}, {setting.experiments} experiments"
        subtitle = f"{self.source}; {_promise(setting)}, {rounds}"
        return FigureStudies([fig6_fig7.multi_sample_study(figure, setting)], subtitle)

    def _league(self, figure: str) -> FigureStudies:
        """Return the league of private accuracies, with unclipped chains or without."""
        count = self._count(figure)
        setting = League(count, self.memory, unclipped=figure != "league")
        subtitle = (
            "60,000 images on 30 devices, (ε, 1e-5) per image (add-remove), 20 dB, "
            f"{count} experiments"
        )
        return FigureStudies([league_study(setting)], subtitle)

    def _record(self) -> FigureStudies:
        """Return the study of examples that are clipped one by one."""
        setting = self._chains("record")
        channels = f"{setting.experiments} channels"
        subtitle = f"{self.source}; {RECORD_SNR:g} dB, S = 100, {channels}"
        return FigureStudies([record_study(setting)], subtitle)

    def _beyond(self) -> FigureStudies:
        """Return the studies past the paper."""
        count = self._count("beyond")
        chains = self._chains("beyond")
        images = self._mnist("beyond")
        fewer_chains = replace(chains, experiments=min(count, MAX_BEYOND_CHANNELS))
        studies = [
            beyond_gaussian(fewer_chains),
            beyond_mnist(images),
            beyond_ablation(images),
        ]
        plural = "s" if count > 1 else ""
        subtitle = (
            f"left: {self.source}, {_promise(chains)}; middle and right: MNIST, "
            f"{count} experiment{plural}"
        )
        return FigureStudies(studies, subtitle)

    def _images(self, figure: str) -> FigureStudies:
        """Return figure 8, or `heterogeneity`."""
        setting = self._mnist(figure)
        build = fig8.mnist_study if figure == "fig8" else fig8.heterogeneity_study
        limit = "" if self.stop_se is None else "up to "
        subtitle = (
            f"12,000 images on 30 devices; {_promise(setting)}, 550 + 50 rounds, "
            f"{limit}{setting.experiments} experiments"
        )
        return FigureStudies([build(setting)], subtitle)


def _promise(setting: Setting | fig6_fig7.MultiSample | fig8.Mnist) -> str:
    """Return the promise of a setting, for titles."""
    return f"ε = {setting.epsilon:g}, δ = {setting.delta:g} (replace)"


def _on_data(posterior: Posterior | None, claims: list[Claim]) -> list[Claim]:
    """Return claims as they are for data of the paper's kind.

    These have five parameters, and μ + L near its 2508. On other data its statements
    need not hold, and that they do not says nothing about the paper.
    """
    if posterior is None or _is_of_papers_kind(posterior):
        return claims
    other_data = "other data than the paper's"
    return [
        claim._replace(
            contradiction=False, note=claim.note if claim.holds else other_data
        )
        for claim in claims
    ]


def _is_of_papers_kind(posterior: Posterior) -> bool:
    """Return whether data are like the paper's."""
    ratio = (posterior.mu + posterior.L) / PAPER_MU_PLUS_L
    return posterior.dim == PAPER_DIM and abs(ratio - 1) < PAPER_TOLERANCE
