"""Which studies a figure consists of, from which data and with how many experiments; and which claims follow."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from wflmc.apps.studies.beyond import (
    RECORD_SNR,
    beyond_ablation,
    beyond_gaussian,
    beyond_mnist,
    record_study,
)
from wflmc.apps.studies.cache import Warn
from wflmc.apps.studies.league import OTHER, League, league_study
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
from wflmc.posterior import Posterior, gaussian_regression
from wflmc.scenario.files import load_data
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

PAPER_FIGURES = (*NAMES, "fig6", "fig7", "fig8")
FURTHER_FIGURES = ("heterogeneity", "record", "beyond", "league", "league-posterior")
MNIST_FIGURES = {"fig8", "heterogeneity", "beyond"}
GAUSSIAN_FIGURES = {*PAPER_FIGURES, *FURTHER_FIGURES} - {
    "fig8",
    "heterogeneity",
    "league",
    "league-posterior",
}
EXPERIMENTS = {
    "fig6": 100,
    "fig7": 100,
    "fig8": 50,
    "heterogeneity": 10,
    "record": 10,
    "beyond": 10,
    "league": 3,
}
PROMISE = "ε = {0.epsilon:g}, δ = {0.delta:g} (replace)"
"""For titles, of a setting."""


def read_data(
    paths: list[Path], wanted: list[str], note: Warn
) -> tuple[Posterior | None, str, Features | None]:
    """Return what the wanted figures need: the paper's posterior of 30 devices, the name of its data, and MNIST.

    Args:
        paths: a file for the posterior, by default synthetic data, and a folder of MNIST, which is fetched by default.
    """
    files, folders = (
        [path for path in paths if path.is_dir() == is_folder]
        for is_folder in (False, True)
    )
    if len(files) > 1 or len(folders) > 1:
        raise InputError(
            "data",
            [*map(str, paths)],
            "at most one .npz or .csv file and one folder of MNIST",
        )
    posterior, source, features = None, "synthetic data", None
    uses_file, uses_mnist = GAUSSIAN_FIGURES & set(wanted), MNIST_FIGURES & set(wanted)
    for path in [*([] if uses_file else files), *([] if uses_mnist else folders)]:
        note(f"--data {path} is not used: {', '.join(wanted)} have other data.")
    key = jax.random.key(0)
    if uses_file:
        X = y = None
        if files:
            source, ((X, y, *_), _) = files[0].name, load_data(files[0])
        posterior = gaussian_regression(key, devices=30, X=X, y=y, partition="blocks")
    for name in (
        OTHER
        if any(figure.startswith("league") for figure in wanted)
        else ["mnist"]
        if uses_mnist
        else []
    ):
        if not folders and not os.environ.get(VARIABLE) and find(name)[1]:
            note(f"{DATA_SETS[name].title} is not here yet; fetching it.")
            fetch(name, say=note)
    if uses_mnist:
        features = mnist_features(load("mnist", *folders), host_generator(key, "data"))
    return posterior, source, features


@dataclass(frozen=True)
class Reproduction:
    """The data of the figures, and how much is computed from them.

    Args:
        gaussian: `GaussianPosterior` of figures 2 to 7, `record` and `beyond`; None where none of them is wanted.
        source: name of its data, for titles.
        features: `Features` of MNIST, for figure 8, `heterogeneity` and `beyond`; None where none of them is wanted.
        experiments: instead of a figure's usual number.
        stop_se: stop a point of figure 8 or `heterogeneity` at this relative standard error.
        memory: limit of the sampler, in bytes.
    """

    gaussian: Any
    source: str
    features: Any
    experiments: int | None = None
    stop_se: float | None = None
    memory: float | None = None

    def studies(self, figure: str) -> tuple[list[Study], str]:
        """Return the studies whose tables the figure shows, and the line under its title."""
        count = self.experiments or EXPERIMENTS.get(
            figure.removesuffix("-posterior"), 1
        )
        chains = fig6_fig7.MultiSample(
            self.gaussian, experiments=count, memory=self.memory
        )
        images = fig8.Mnist(
            self.features, experiments=count, stop_se=self.stop_se, memory=self.memory
        )
        if figure in NAMES:
            setting = Setting(self.gaussian)
            promise = (
                PROMISE.format(setting)
                if figure != "fig5"
                else f"δ = {setting.delta:g} (replace)"
            )  # x is ε
            study = fig2_to_fig5.closed_form_study(figure, setting)
            return [study], f"{self.source}; {promise}, {setting.burn_in} + 1 rounds"
        if figure in ("fig6", "fig7"):
            about = f"{self.source}; {PROMISE.format(chains)}, S = {chains.rounds}, {count} experiments"
            return [fig6_fig7.multi_sample_study(figure, chains)], about
        if figure.startswith("league"):
            about = f"60,000 images on 30 devices, (ε, 1e-5) per image (add-remove), 20 dB, {count} experiments"
            return [
                league_study(League(count, self.memory, posterior=figure != "league"))
            ], about
        if figure == "record":
            return [
                record_study(chains)
            ], f"{self.source}; {RECORD_SNR:g} dB, S = 100, {count} channels"
        if figure == "beyond":
            few = replace(chains, experiments=min(count, 5))
            about = f"left: {self.source}, {PROMISE.format(chains)}; middle and right: MNIST, {count} experiment"
            return [
                beyond_gaussian(few),
                beyond_mnist(images),
                beyond_ablation(images),
            ], about + "s" * (count > 1)
        study = (
            fig8.mnist_study(images)
            if figure == "fig8"
            else fig8.heterogeneity_study(images)
        )
        about = (
            f"12,000 images on 30 devices; {PROMISE.format(images)}, 550 + 50 rounds"
        )
        return [
            study
        ], f"{about}, {'' if self.stop_se is None else 'up to '}{count} experiments"

    def claims(self, tables: Tables) -> list[Claim]:
        """Return the paper's stated outcomes of the figures whose tables there are, with our numbers."""
        claims = [*fig6_fig7.claims(tables)]
        if set(NAMES) & set(tables):
            claims = [*fig2_to_fig5.claims(Setting(self.gaussian)), *claims]
        claims = [*_on_data(self.gaussian, claims), *fig8.claims(tables)]
        doubt = f"; only {self.experiments} experiments, which may not decide it"
        few = {
            name
            for name, usual in EXPERIMENTS.items()
            if self.experiments and self.experiments < usual / 2
        }
        return [
            claim._replace(note=claim.note + doubt) if claim.figure in few else claim
            for claim in claims
        ]


def _on_data(posterior: Posterior | None, claims: list[Claim]) -> list[Claim]:
    """Return claims as they are for data of the paper's kind: five parameters, and μ + L near its 2508.

    On other data its statements need not hold, and that they do not says nothing about the paper.
    """
    if posterior is None or (
        posterior.dim == 5 and abs((posterior.mu + posterior.L) / 2508 - 1) < 0.15
    ):
        return claims
    other = "other data than the paper's"
    return [
        claim._replace(contradiction=False, note=claim.note if claim.holds else other)
        for claim in claims
    ]
