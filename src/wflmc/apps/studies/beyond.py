"""Studies past the paper, in the settings of its figures 6 and 8.

They go from its schemes to ours, step by step.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import Plan, Policy, Privacy, sample
from wflmc.apps.studies.cache import identity_of
from wflmc.apps.studies.engines import Progress
from wflmc.apps.studies.paper.common import SNR_GRID, plans_of
from wflmc.apps.studies.paper.fig6_fig7 import MultiSample
from wflmc.apps.studies.paper.fig8 import Mnist, Recipe, recipes_study
from wflmc.apps.studies.study import Point, Row, Study, Tables, mean_row
from wflmc.evaluation import estimate_w2_sq, exact_ess, exact_w2_sq
from wflmc.posterior import GaussianPosterior

EXAMPLE_CLIP = 9.0
"""Clipping threshold of an example's gradient, beside figure 6's ℓ = 30 for a
device."""
RECORD_SNR = 30.0
"""SNR of the study of records, in dB."""
RECORD_SCHEMES = ("device, paper", "device, exact", "record, exact")
"""Curves of the study of records, in the order of `Promises`."""
RECORD_EPSILONS = tuple(float(epsilon) for epsilon in range(1, 21))
"""ε of the study of records."""
SMALL_STEP_FACTOR = 0.3
"""η (μ + L) of our schemes, where the paper's have 0.4."""
ABLATION_SNR = 20.0
"""SNR of the ablation, in dB."""


class Promises(NamedTuple):
    """The same (ε, δ), accounted in three ways."""

    paper: Privacy
    """For a device, by the paper's accountant."""
    exact: Privacy
    """For a device, by the exact accountant."""
    record: Privacy
    """For one example, by the exact accountant."""


def _promises(setting: MultiSample, epsilon: float) -> Promises:
    """Return the promises of a setting at an ε."""
    delta = setting.delta
    clip = setting.clip
    return Promises(
        paper=Privacy(epsilon, delta, clip, "paper"),
        exact=Privacy(epsilon, delta, clip),
        record=Privacy(epsilon, delta, clip, unit="record", example_clip=EXAMPLE_CLIP),
    )


class Scheme(NamedTuple):
    """What a curve is planned with, beside figure 6's rounds and channels."""

    privacy: Privacy
    power: str = "optimized"
    policy: Policy = Policy()
    """Its power is `power`."""
    step_size: float | None = None
    """η; None for figure 6's."""


def _plans(setting: MultiSample, snr_db: float, scheme: Scheme) -> list[Plan]:
    """Return one plan of a scheme for each channel."""
    paper_request = setting.request(snr_db, setting.rounds // 2)
    step_size = scheme.step_size
    if step_size is None:
        step_size = setting.step_size
    request = replace(
        paper_request,
        privacy=scheme.privacy,
        policy=scheme.policy,
        step_size=step_size,
    )
    links = setting.links(snr_db)
    return plans_of(scheme.power, setting.posterior, links, request)


def _worst(posterior: GaussianPosterior, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Return the exact W2² of each plan, worst after burn-in."""
    worst = [exact_w2_sq(posterior, plan)[plan.burn_in :].max() for plan in plans]
    return np.array(worst)


def schemes_of(setting: MultiSample) -> dict[str, Scheme]:
    """Return the schemes of the Gaussian study, by name.

    Those with a + in front add to the one before. The exact law as an objective is an
    oracle: it knows the posterior. The last scheme has neither noise nor clipping.

    Args:
        setting: the paper's, with its posterior.
    """
    promises = _promises(setting, setting.epsilon)
    posterior = setting.posterior
    small_step = SMALL_STEP_FACTOR / (posterior.mu + posterior.L)
    by_paper = Policy(bound="paper")
    by_law = Policy(objective="exact")
    limited = Policy(objective="exact", max_round_noise=1.0)
    nothing = Privacy(None, None, setting.clip)
    small_steps = Scheme(promises.exact, policy=limited, step_size=small_step)
    return {
        "equal (the paper's)": Scheme(promises.paper, power="equal", policy=by_paper),
        "optimized (the paper's)": Scheme(promises.paper, policy=by_paper),
        "+ corrected bound": Scheme(promises.paper),
        "+ exact accountant": Scheme(promises.exact),
        "+ exact law as objective": Scheme(promises.exact, policy=by_law),
        "+ step 0.3/(mu+L), noise limit 1": small_steps,
        "+ one example hidden, not a device": small_steps._replace(
            privacy=promises.record
        ),
        "noiseless, unclipped": Scheme(nothing, power="noiseless"),
    }


def beyond_gaussian(setting: MultiSample, chains: int = 2000) -> Study:
    """Return the study of schemes on the Gaussian posterior, against SNR.

    Args:
        setting: figure 6's; its experiments are channels.
        chains: of the estimate on the first channel, which are clipped as they are in a
            run.

    Returns:
        A study with three tables. `beyond_w2` has W2² by the exact law, worst after
        burn-in, mean over channels; `beyond_chains` has the same estimated from chains
        on the first channel; `beyond_ess` has the exact effective sample size of one
        chain.
    """
    names = tuple(schemes_of(setting))
    points = tuple(Point(snr_db, names) for snr_db in SNR_GRID)
    identity = {**identity_of(setting, "posterior"), "chains": chains}
    measure = partial(_measure_gaussian, setting=setting, chains=chains)
    return Study("beyond_gaussian", points, names, identity, measure)


def _measure_gaussian(
    point: Point,
    progress: Progress,
    *,
    setting: MultiSample,
    chains: int,
) -> Tables:
    """Return distances and effective sample sizes of all schemes at an SNR."""
    posterior = setting.posterior
    schemes = schemes_of(setting)
    snr_db = float(point.x or 0)
    tables: Tables = {"beyond_w2": [], "beyond_ess": [], "beyond_chains": []}
    for index, (name, scheme) in enumerate(schemes.items()):
        plans = _plans(setting, snr_db, scheme)
        ess = np.array([exact_ess(posterior, plan).min() for plan in plans])
        trace = sample(jax.random.key(0), posterior, plans[0], chains)
        distance = estimate_w2_sq(trace.theta, posterior.exact)
        worst = _worst(posterior, plans)
        chains_row = Row("beyond", name, snr_db, distance.worst, distance.worst_se)
        tables["beyond_w2"].append(mean_row("beyond", name, snr_db, worst))
        tables["beyond_ess"].append(mean_row("beyond", name, snr_db, ess))
        tables["beyond_chains"].append(chains_row)
        progress((index + 1) / len(schemes))
    return tables


def record_study(setting: MultiSample) -> Study:
    """Return the study of what clipping examples one by one buys, against ε.

    The same (ε, δ) is promised for one example replaced and not for a device, at 30 dB.

    Args:
        setting: figure 6's; its experiments are channels.

    Returns:
        A study with two tables. `record` has the exact W2², worst after burn-in, mean
        over channels; `record_budget` has the Σ 2(αℓ)²/N0 that may be spent.
    """
    points = tuple(Point(epsilon, RECORD_SCHEMES) for epsilon in RECORD_EPSILONS)
    identity = identity_of(setting, "posterior")
    measure = partial(_measure_records, setting=setting)
    return Study("record", points, RECORD_SCHEMES, identity, measure)


def _measure_records(
    point: Point, progress: Progress, *, setting: MultiSample
) -> Tables:
    """Return distances and budgets of all promises at an ε."""
    epsilon = float(point.x or 0)
    promises = _promises(setting, epsilon)
    tables: Tables = {"record": [], "record_budget": []}
    for name, privacy in zip(RECORD_SCHEMES, promises, strict=True):
        plans = _plans(setting, RECORD_SNR, Scheme(privacy))
        worst = _worst(setting.posterior, plans)
        budget = float(_device_budget(setting, privacy))
        tables["record"].append(mean_row("record", name, epsilon, worst))
        tables["record_budget"].append(Row("record_budget", name, epsilon, budget))
    return tables


def _device_budget(setting: MultiSample, privacy: Privacy) -> float:
    """Return the Σ 2(αℓ)²/N0 that a promise lets a device spend."""
    devices = setting.posterior.devices
    budget = privacy.budget(devices)[0]
    sensitivity = privacy.sensitivity(devices)[0]
    return budget * (setting.clip / sensitivity) ** 2


IMAGE_PROMISE: Recipe = {
    "epsilon": 1.25,
    "clip": 30.0,
    "example_clip": 3.0,
    "accountant": "exact",
}
"""A promise for an image, as strong as it is useful."""
SAMPLER: Recipe = {
    "bound": "corrected",
    "step_factor": 0.6,
    "init": "zero",
    "intercept": True,
    "whiten": "public",
}
"""How chains move, and in which coordinates."""
OURS: Recipe = {**IMAGE_PROMISE, **SAMPLER}
"""What differs from the paper's setting of figure 8."""
PAID: Recipe = {**OURS, "clip": 60.0, "whiten": "private"}
"""Ours, with whitened coordinates that are paid for."""
LONG: Recipe = {
    **OURS,
    "clip": 60.0,
    "example_clip": 1.5,
    "step_factor": 0.4,
    "burn_in": 200,
    "samples": 400,
}
"""Ours, with the rounds that a strong promise needs."""
RECIPES: dict[str, Recipe] = {
    "the paper's optimum, a device (50, 0.1)": {},
    "ours, an image (1.25, 0.1)": OURS,
    "ours, whitening paid for, an image (2, 0.1)": {**PAID, "epsilon": 2.0},
    "ours, an image (5, 1e-5)": {**OURS, "epsilon": 5.0, "delta": 1e-5},
    "ours, an image (1, 1e-5)": {**LONG, "epsilon": 1.0, "delta": 1e-5},
}
"""Curves of `beyond_mnist`, by name."""
PAPER_RECORD: Recipe = {"epsilon": 1.25, "example_clip": 10.0, "accountant": "exact"}
"""The paper's recipe with a promise for an image."""
ABLATION: dict[str, Recipe] = {
    "ours": OURS,
    "without whitening": {**OURS, "whiten": "none"},
    "without an intercept": {**OURS, "intercept": False},
    "without clipping images: a device hidden": {**OURS, "example_clip": None},
    "without the exact accountant": {**OURS, "accountant": "paper"},
    "with the paper's step 2/(mu+L)": {**OURS, "step_factor": 2.0},
    "with a start from the prior": {**OURS, "init": "prior"},
    "with whitening paid for": PAID,
    "without a promise": {**OURS, "epsilon": None, "delta": None},
    "the paper's recipe, an image hidden at (1.25, 0.1)": PAPER_RECORD,
    "the paper's recipe, a device hidden at (1.25, 0.1)": {"epsilon": 1.25},
    "the paper's recipe, a device hidden at (50, 0.1)": {},
}
"""Bars of `beyond_ablation`, by name."""


def beyond_mnist(setting: Mnist) -> Study:
    """Return test scores on MNIST against SNR: the paper's optimum and ours.

    Beside the scores there is ε, which is below the promised one where noise would have
    to be weaker to spend it all. All experiments are computed, whatever their error.

    Args:
        setting: figure 8's.
    """
    return recipes_study(
        "beyond",
        replace(setting, stop_se=None),
        RECIPES,
        varies="snr_db",
        grid=SNR_GRID,
        score="epsilon",
    )


def beyond_ablation(setting: Mnist) -> Study:
    """Return test scores on MNIST at 20 dB without one ingredient after the other.

    Beside the scores there is ε. All experiments are computed, whatever their error, as
    differences between the rows are small.

    Args:
        setting: figure 8's.
    """
    return recipes_study(
        "beyond_ablation",
        replace(setting, stop_se=None),
        ABLATION,
        varies="snr_db",
        grid=(ABLATION_SNR,),
        score="epsilon",
    )
