"""Studies past the paper, in the settings of its figures 6 and 8: its schemes and ours, step by step."""

from collections.abc import Sequence
from dataclasses import replace
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
"""Clipping threshold of an example's gradient, beside figure 6's ℓ = 30 for a device."""
RECORD_SNR = 30.0


def _promises(setting: MultiSample, epsilon: float) -> tuple[Privacy, Privacy, Privacy]:
    """Return (ε, δ) for a device by the paper's and by the exact accountant, and for one example."""
    given = epsilon, setting.delta, setting.clip
    return (
        Privacy(*given, "paper"),
        Privacy(*given),
        Privacy(*given, unit="record", example_clip=EXAMPLE_CLIP),
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
    paper = setting.request(snr_db, setting.rounds // 2)
    request = replace(
        paper,
        privacy=scheme.privacy,
        policy=scheme.policy,
        step_size=paper.step_size if scheme.step_size is None else scheme.step_size,
    )
    return plans_of(scheme.power, setting.posterior, setting.links(snr_db), request)


def _worst(posterior: GaussianPosterior, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """Return the exact W2² of each plan, worst after burn-in."""
    return np.array(
        [exact_w2_sq(posterior, plan)[plan.burn_in :].max() for plan in plans]
    )


def schemes_of(setting: MultiSample) -> dict[str, Scheme]:
    """Return the schemes by name; those with a + add to the one before. The exact law is an oracle."""
    paper, exact, record = _promises(setting, setting.epsilon)
    step_size = 0.3 / (setting.posterior.mu + setting.posterior.L)
    by_paper = Policy(bound="paper")
    by_law = Policy(objective="exact")
    limited = Policy(objective="exact", max_round_noise=1.0)
    nothing = Privacy(None, None, setting.clip)
    return {
        "equal (the paper's)": Scheme(paper, power="equal", policy=by_paper),
        "optimized (the paper's)": Scheme(paper, policy=by_paper),
        "+ corrected bound": Scheme(paper),
        "+ exact accountant": Scheme(exact),
        "+ exact law as objective": Scheme(exact, policy=by_law),
        "+ step 0.3/(mu+L), noise limit 1": Scheme(
            exact, policy=limited, step_size=step_size
        ),
        "+ one example hidden, not a device": Scheme(
            record, policy=limited, step_size=step_size
        ),
        "noiseless, unclipped": Scheme(nothing, power="noiseless"),
    }


def beyond_gaussian(setting: MultiSample, chains: int = 2000) -> Study:
    """Return W2², worst after burn-in: by the exact law, mean over channels, and from clipped chains on the first.

    Beside it the exact effective sample size of one chain.
    """
    posterior, schemes = setting.posterior, schemes_of(setting)

    def measure(point: Point, progress: Progress) -> Tables:
        x = float(point.x or 0)
        tables: Tables = {"beyond_w2": [], "beyond_ess": [], "beyond_chains": []}
        for index, (name, scheme) in enumerate(schemes.items()):
            plans = _plans(setting, x, scheme)
            ess = np.array([exact_ess(posterior, plan).min() for plan in plans])
            trace = sample(jax.random.key(0), posterior, plans[0], chains)
            distance = estimate_w2_sq(trace.theta, posterior.exact)
            tables["beyond_w2"].append(
                mean_row("beyond", name, x, _worst(posterior, plans))
            )
            tables["beyond_ess"].append(mean_row("beyond", name, x, ess))
            tables["beyond_chains"].append(
                Row("beyond", name, x, distance.worst, distance.worst_se)
            )
            progress((index + 1) / len(schemes))
        return tables

    points = tuple(Point(x, tuple(schemes)) for x in SNR_GRID)
    identity = {**identity_of(setting, "posterior"), "chains": chains}
    return Study("beyond_gaussian", points, tuple(schemes), identity, measure)


def record_study(setting: MultiSample) -> Study:
    """Return what clipping examples one by one buys: the same (ε, δ) for one example replaced, not for a device.

    `record` is the exact W2², worst after burn-in, mean over channels; `record_budget` the Σ 2(αℓ)²/N0 that may be
    spent.
    """
    names, devices = (
        ("device, paper", "device, exact", "record, exact"),
        setting.posterior.devices,
    )

    def measure(point: Point, progress: Progress) -> Tables:
        epsilon = float(point.x or 0)
        tables: Tables = {"record": [], "record_budget": []}
        for name, privacy in zip(names, _promises(setting, epsilon), strict=True):
            worst = _worst(
                setting.posterior, _plans(setting, RECORD_SNR, Scheme(privacy))
            )
            tables["record"].append(mean_row("record", name, epsilon, worst))
            budget = (
                privacy.budget(devices)[0]
                * (setting.clip / privacy.sensitivity(devices)[0]) ** 2
            )
            tables["record_budget"].append(
                Row("record_budget", name, epsilon, float(budget))
            )
        return tables

    points = tuple(Point(float(epsilon), names) for epsilon in range(1, 21))
    return Study("record", points, names, identity_of(setting, "posterior"), measure)


IMAGE_PROMISE: Recipe = {
    "epsilon": 1.25,
    "clip": 30.0,
    "example_clip": 3.0,
    "accountant": "exact",
}
SAMPLER: Recipe = {
    "bound": "corrected",
    "step_factor": 0.6,
    "init": "zero",
    "intercept": True,
    "whiten": "public",
}
OURS: Recipe = {**IMAGE_PROMISE, **SAMPLER}
"""What differs from the paper's setting of figure 8."""
PAID: Recipe = {**OURS, "clip": 60.0, "whiten": "private"}
LONG: Recipe = {
    **OURS,
    "clip": 60.0,
    "example_clip": 1.5,
    "step_factor": 0.4,
    "burn_in": 200,
    "samples": 400,
}
RECIPES: dict[str, Recipe] = {
    "the paper's optimum, a device (50, 0.1)": {},
    "ours, an image (1.25, 0.1)": OURS,
    "ours, whitening paid for, an image (2, 0.1)": {**PAID, "epsilon": 2.0},
    "ours, an image (5, 1e-5)": {**OURS, "epsilon": 5.0, "delta": 1e-5},
    "ours, an image (1, 1e-5)": {**LONG, "epsilon": 1.0, "delta": 1e-5},
}
PAPER_RECORD: Recipe = {"epsilon": 1.25, "example_clip": 10.0, "accountant": "exact"}
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


def beyond_mnist(setting: Mnist) -> Study:
    """Return test scores against SNR: the paper's optimum and ours."""
    return recipes_study(
        "beyond", replace(setting, stop_se=None), RECIPES, "snr_db", SNR_GRID, "epsilon"
    )


def beyond_ablation(setting: Mnist) -> Study:
    """Return test scores at 20 dB without one ingredient after the other."""
    return recipes_study(
        "beyond_ablation",
        replace(setting, stop_se=None),
        ABLATION,
        "snr_db",
        (20.0,),
        "epsilon",
    )
