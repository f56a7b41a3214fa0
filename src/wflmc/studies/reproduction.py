"""Which studies a figure consists of, from which data and with how many experiments; and which claims follow."""

from __future__ import annotations

from dataclasses import dataclass

from wflmc.data import Features
from wflmc.posterior import GaussianPosterior
from wflmc.studies.beyond import (
    BeyondGaussian,
    BeyondMnist,
    RecordSetting,
    beyond_ablation,
    beyond_gaussian,
    beyond_mnist,
    record_study,
)
from wflmc.studies.paper import measured_claims
from wflmc.studies.paper.claim import Claim
from wflmc.studies.paper.fig2_to_fig5 import NAMES, Setting, claims, closed_form_study
from wflmc.studies.paper.fig6_fig7 import MultiSample, multi_sample_study
from wflmc.studies.paper.fig8 import Mnist, heterogeneity_study, mnist_study
from wflmc.studies.study import Study, Tables

PAPER_FIGURES = (*NAMES, "fig6", "fig7", "fig8")
FURTHER_FIGURES = ("heterogeneity", "record", "beyond")
MNIST_FIGURES = {"fig8", "heterogeneity", "beyond"}
GAUSSIAN_FIGURES = {*PAPER_FIGURES, *FURTHER_FIGURES} - {"fig8", "heterogeneity"}
EXPERIMENTS = {"fig6": 100, "fig7": 100, "fig8": 50, "heterogeneity": 10, "record": 10, "beyond": 10}


@dataclass(frozen=True)
class Reproduction:
    """The data of the figures, and how much is computed from them.

    Args:
        gaussian: posterior of figures 2 to 7, `record` and `beyond`; None where none of them is wanted.
        source: name of its data, for titles.
        features: MNIST, for figure 8, `heterogeneity` and `beyond`; None where none of them is wanted.
        experiments: instead of a figure's usual number.
        stop_se: stop a point of figure 8 or `heterogeneity` at this relative standard error.
        memory: limit of the sampler, in bytes.
    """

    gaussian: GaussianPosterior | None
    source: str
    features: Features | None
    experiments: int | None = None
    stop_se: float | None = None
    memory: float | None = None

    def studies(self, figure: str) -> tuple[list[Study], str]:
        """Return the studies whose tables the figure shows, and the line under its title."""
        if figure in NAMES:
            return [closed_form_study(figure, Setting(self.gaussian))], self.source
        count = self.experiments or EXPERIMENTS[figure]
        if figure in ("fig6", "fig7"):
            chains = MultiSample(self.gaussian, experiments=count, memory=self.memory)
            promise = f"ε = {chains.epsilon:g}, δ = {chains.delta:g} (replace)"
            about = f"{self.source}; {promise}, S = {chains.rounds}, {count} experiments"
            return [multi_sample_study(figure, chains)], about
        if figure == "record":
            record = RecordSetting(self.gaussian, channels=count)
            return [record_study(record)], f"{self.source}; {record.snr_db:g} dB, S = 100, {count} channels"
        assert self.features is not None
        if figure == "beyond":
            linear = BeyondGaussian(self.gaussian, channels=min(count, 5))
            images = BeyondMnist(self.features, experiments=count, memory=self.memory)
            about = f"left: {self.source}, ε = 15, δ = 0.01 (replace); middle and right: MNIST, {count} experiment"
            work = [beyond_gaussian(linear), beyond_mnist(images), beyond_ablation(images)]
            return work, about + "s" * (count > 1)
        mnist = Mnist(self.features, experiments=count, stop_se=self.stop_se, memory=self.memory)
        make = mnist_study if figure == "fig8" else heterogeneity_study
        about = f"12,000 images on 30 devices; ε = {mnist.epsilon:g}, δ = {mnist.delta:g} (replace), 550 + 50 rounds"
        return [make(mnist)], f"{about}, {'up to ' * (self.stop_se is not None)}{count} experiments"

    def claims(self, tables: Tables) -> list[Claim]:
        """Return the paper's stated outcomes of the figures whose tables there are, with our numbers."""
        found = claims(Setting(self.gaussian)) if set(NAMES) & set(tables) else []
        found += measured_claims(tables, self.gaussian)
        if self.experiments is None:
            return found
        doubt = f"; only {self.experiments} experiments, which may not decide it"
        few = {name for name, usual in EXPERIMENTS.items() if self.experiments < usual / 2}
        return [claim._replace(note=claim.note + doubt) if claim.figure in few else claim for claim in found]
