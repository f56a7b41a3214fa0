"""Past the paper, on the paper's own ground: its schemes and ours in the settings of figures 6 and 8, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import channel
from wflmc.channel import Link
from wflmc.data import Features
from wflmc.evaluation import estimate_w2_sq, exact_ess, exact_w2_sq, predictive_scores
from wflmc.planning import Plan, plan_many
from wflmc.posterior import SoftmaxPosterior, softmax_regression
from wflmc.preconditioning import release_whitening
from wflmc.privacy import Privacy
from wflmc.sampling import sample
from wflmc.studies.paper.fig8 import SCORES, SNR_GRID
from wflmc.studies.study import Point, Progress, Row, Study, Tables, digest

Promises = dict[str, tuple[Privacy, dict[str, Any]]]


@dataclass(frozen=True)
class BeyondGaussian:
    """Figure 6's setting: Rayleigh fading of power 0.01, ε = 15, δ = 0.01, ℓ = 30, S = 100, η = 0.4/(μ + L)."""

    posterior: Any
    channels: int = 5
    chains: int = 2000
    """Clipped chains on the first channel."""
    epsilon: float = 15.0
    delta: float = 0.01
    clip: float = 30.0
    example_clip: float = 9.0
    burn_in: int = 50
    samples: int = 50
    step_factor: float = 0.4

    @property
    def steps(self) -> Promises:
        """Each adds to the one before, but for the first two and the last; plans by the exact law are oracles."""
        given = self.epsilon, self.delta, self.clip
        small = {"step_factor": 0.3, "max_round_noise": 1.0}
        exact, record = Privacy(*given), Privacy(*given, unit="record", example_clip=self.example_clip)
        return {
            "equal (the paper's)": (Privacy(*given, "paper"), {"power": "equal", "bound": "paper"}),
            "optimized (the paper's)": (Privacy(*given, "paper"), {"bound": "paper"}),
            "+ corrected bound": (Privacy(*given, "paper"), {}),
            "+ exact accountant": (exact, {}),
            "+ exact law as objective": (exact, {"objective": "exact"}),
            "+ step 0.3/(mu+L), noise limit 1": (exact, {**small, "objective": "exact"}),
            "+ one example hidden, not a device": (record, {**small, "objective": "exact"}),
            "noiseless, unclipped": (Privacy(None, None, self.clip), {"power": "noiseless"}),
        }


def beyond_gaussian(setting: BeyondGaussian) -> Study:
    """W2², worst after burn-in: by the exact law, mean over channels, and from clipped chains on the first of them.

    Beside it the exact effective sample size of one chain.
    """
    names = tuple(setting.steps)

    def measure(point: Point, progress: Progress) -> Tables:
        posterior, x = setting.posterior, float(point.x or 0)
        links = [Link(channel.rayleigh(0.01), x, seed=seed) for seed in range(setting.channels)]
        tables: Tables = {"beyond_w2": [], "beyond_ess": [], "beyond_chains": []}
        for index, (name, (promise, keywords)) in enumerate(setting.steps.items()):
            plans = plan_many(
                posterior,
                links,
                promise,
                step_size=keywords.pop("step_factor", setting.step_factor) / (posterior.mu + posterior.L),
                burn_in=setting.burn_in,
                samples=setting.samples,
                **keywords,
            )
            worst = np.array([exact_w2_sq(posterior, plan)[setting.burn_in :].max() for plan in plans])
            ess = np.array([exact_ess(posterior, plan).min() for plan in plans])
            tables["beyond_w2"].append(_row(name, x, worst))
            tables["beyond_ess"].append(_row(name, x, ess))
            trace = sample(jax.random.key(0), posterior, plans[0], setting.chains)
            distance = estimate_w2_sq(trace.theta, posterior.exact)
            tables["beyond_chains"].append(Row("beyond", name, x, distance.worst, distance.worst_se))
            progress((index + 1) / len(names))
        return tables

    settings = {k: v for k, v in dataclasses.asdict(setting).items() if k != "posterior"}
    identity = {**settings, "data": digest(setting.posterior)}
    return Study("beyond_gaussian", tuple(Point(x, names) for x in SNR_GRID), names, identity, measure)


@dataclass(frozen=True)
class Recipe:
    """One way to sample the MNIST posterior; by default the paper's."""

    epsilon: float | None = 50.0
    delta: float | None = 0.1
    clip: float = 300.0
    example_clip: float | None = None
    accountant: str = "paper"
    bound: str = "paper"
    step_factor: float = 2.0
    init: str = "prior"
    intercept: bool = False
    whiten: str = "none"
    burn_in: int = 550
    samples: int = 50

    @property
    def privacy(self) -> Privacy:
        """What devices are promised."""
        unit = "device" if self.example_clip is None else "record"
        accountant = self.accountant if self.epsilon is not None else "exact"
        return Privacy(self.epsilon, self.delta, self.clip, accountant, unit, self.example_clip)


PAPER = Recipe()
OURS = Recipe(1.25, 0.1, 30.0, 3.0, "exact", "corrected", 0.6, "zero", intercept=True, whiten="public")
PAID = replace(OURS, clip=60.0, whiten="private")
RECIPES = {
    "the paper's optimum, a device (50, 0.1)": PAPER,
    "ours, an image (1.25, 0.1)": OURS,
    "ours, whitening paid for, an image (2, 0.1)": replace(PAID, epsilon=2.0),
    "ours, an image (5, 1e-5)": replace(OURS, epsilon=5.0, delta=1e-5),
    "ours, an image (1, 1e-5)": replace(
        OURS, epsilon=1.0, delta=1e-5, clip=60.0, example_clip=1.5, step_factor=0.4, burn_in=200, samples=400
    ),
}
ABLATION = {
    "ours": OURS,
    "without whitening": replace(OURS, whiten="none"),
    "without an intercept": replace(OURS, intercept=False),
    "without clipping images: a device hidden": replace(OURS, example_clip=None),
    "without the exact accountant": replace(OURS, accountant="paper"),
    "with the paper's step 2/(mu+L)": replace(OURS, step_factor=2.0),
    "with a start from the prior": replace(OURS, init="prior"),
    "with whitening paid for": PAID,
    "without a promise": replace(OURS, epsilon=None, delta=None),
    "the paper's recipe, an image hidden at (1.25, 0.1)": replace(
        PAPER, epsilon=1.25, example_clip=10.0, accountant="exact"
    ),
    "the paper's recipe, a device hidden at (1.25, 0.1)": replace(PAPER, epsilon=1.25),
    "the paper's recipe, a device hidden at (50, 0.1)": PAPER,
}
ABLATION_SNR = 20.0


@dataclass(frozen=True)
class BeyondMnist:
    """Figure 8's setting: 12,000 images on 30 devices, Rayleigh fading of power 1e-4, 600 rounds."""

    features: Features
    experiments: int = 10
    devices: int = 30
    gain_power: float = 1e-4
    seed: int = 0
    memory: float | None = None

    def posterior(self, recipe: Recipe) -> SoftmaxPosterior:
        """The training data over the devices, in the coordinates of the recipe where these are public."""
        X, y, key = self.features.X, self.features.y, jax.random.key(self.seed)
        made = softmax_regression(key, self.devices, X=X, y=y, intercept=recipe.intercept, partition="blocks")
        return made.whitened() if recipe.whiten == "public" else made


def beyond_mnist(setting: BeyondMnist) -> Study:
    """Test scores against SNR: the paper's optimum and ours."""
    return _mnist_study("beyond", setting, RECIPES, SNR_GRID)


def beyond_ablation(setting: BeyondMnist) -> Study:
    """Test scores at 20 dB without one ingredient after the other."""
    return _mnist_study("beyond_ablation", setting, ABLATION, (ABLATION_SNR,))


def _mnist_study(name: str, setting: BeyondMnist, recipes: dict[str, Recipe], grid: Sequence[float]) -> Study:
    posteriors: dict[tuple[bool, str], SoftmaxPosterior] = {}

    def measure(point: Point, progress: Progress) -> Tables:
        (scheme,), x = point.schemes, float(point.x or 0)
        recipe = recipes[scheme]
        kind = recipe.intercept, recipe.whiten
        if kind not in posteriors:
            posteriors[kind] = setting.posterior(recipe)
        values = _scores(setting, recipe, posteriors[kind], x, progress)
        return {
            name if score == "ece" else f"{name}_{score}": [_row(scheme, x, found)] for score, found in values.items()
        }

    points = tuple(Point(x, (scheme,)) for x in grid for scheme in recipes)
    settings = {k: v for k, v in dataclasses.asdict(setting).items() if k != "features"}
    settings["recipes"] = {scheme: dataclasses.asdict(recipe) for scheme, recipe in recipes.items()}
    identity = {**settings, "data": digest(setting.features)}
    return Study(name, points, tuple(recipes), identity, measure)


def _scores(
    setting: BeyondMnist, recipe: Recipe, posterior: SoftmaxPosterior, snr_db: float, progress: Progress
) -> dict[str, NDArray[np.float64]]:
    """Test scores and ε spent of every experiment, each on a channel of its own."""
    links = [
        Link(channel.rayleigh(setting.gain_power), snr_db, seed=setting.seed + number)
        for number in range(setting.experiments)
    ]
    if recipe.whiten == "private":
        parts = [_one_release(setting, recipe, posterior, link, number, progress) for number, link in enumerate(links)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    plans = plan_many(posterior, links, recipe.privacy, **_keywords(recipe, posterior))
    return _run(setting, posterior, plans, range(setting.experiments), progress)


def _one_release(
    setting: BeyondMnist, recipe: Recipe, posterior: SoftmaxPosterior, link: Link, number: int, progress: Progress
) -> dict[str, NDArray[np.float64]]:
    key = jax.random.fold_in(jax.random.key(setting.seed), number)
    release = release_whitening(key, posterior, link, recipe.privacy)
    whitened = posterior.whitened(release.matrix)
    keywords = {**_keywords(recipe, whitened), "ledger": release.spent, "start": len(release.loss)}
    plans = plan_many(whitened, [link], recipe.privacy, **keywords)
    return _run(setting, whitened, plans, [number], lambda done: progress((number + done) / setting.experiments))


def _keywords(recipe: Recipe, posterior: SoftmaxPosterior) -> dict[str, Any]:
    return {
        "step_size": recipe.step_factor / (posterior.mu + posterior.L),
        "burn_in": recipe.burn_in,
        "samples": recipe.samples,
        "objective": "average",
        "bound": recipe.bound,
        "init": recipe.init,
        "initial_w2_sq": 0.0,  # adds the same to every plan's objective
    }


def _run(
    setting: BeyondMnist,
    posterior: SoftmaxPosterior,
    plans: Sequence[Plan],
    numbers: Sequence[int],
    progress: Callable[[float], None],
) -> dict[str, NDArray[np.float64]]:
    trace = sample(
        jax.random.key(setting.seed),
        posterior,
        plans,
        numbers=list(numbers),
        memory=setting.memory,
        progress=lambda done, rounds: progress(0.9 * done / rounds),
    )
    scores = predictive_scores(posterior, trace.theta, setting.features.X_test, setting.features.y_test)
    spent = [np.nan if plan.epsilon_spent is None else plan.epsilon_spent for plan in plans]
    return {**{name: getattr(scores, name) for name in SCORES}, "epsilon": np.array(spent)}


def _row(name: str, x: float, values: NDArray[np.float64]) -> Row:
    error = float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else None
    mean = float(values.mean())
    return Row("beyond", name, x, mean if np.isfinite(mean) else None, error if np.isfinite(mean) else None)


@dataclass(frozen=True)
class RecordSetting:
    """Figure 6's setting at 30 dB, with δ = 0.01 and a clip of 9 per example beside ℓ = 30 per device."""

    posterior: Any
    snr_db: float = 30.0
    delta: float = 0.01
    clip: float = 30.0
    example_clip: float = 9.0
    burn_in: int = 50
    samples: int = 50
    channels: int = 10

    def promises(self, epsilon: float) -> dict[str, Privacy]:
        """The promises that are compared, by the name of their curve."""
        given = epsilon, self.delta, self.clip
        return {
            "device, paper": Privacy(*given, "paper"),
            "device, exact": Privacy(*given),
            "record, exact": Privacy(*given, unit="record", example_clip=self.example_clip),
        }


def record_study(setting: RecordSetting) -> Study:
    """`record`: exact W2², worst after burn-in, mean over channels; `record_budget`: Σ 2(αℓ)²/N0 that may be spent."""
    posterior, K = setting.posterior, setting.posterior.devices
    links = [Link(channel.rayleigh(0.01), setting.snr_db, seed=seed) for seed in range(setting.channels)]
    names = tuple(setting.promises(1.0))

    def measure(point: Point, progress: Progress) -> Tables:
        epsilon = float(point.x or 0)
        tables: Tables = {"record": [], "record_budget": []}
        for name, promise in setting.promises(epsilon).items():
            plans = plan_many(
                posterior,
                links,
                promise,
                step_size=0.4 / (posterior.mu + posterior.L),
                burn_in=setting.burn_in,
                samples=setting.samples,
            )
            worst = np.array([exact_w2_sq(posterior, plan)[setting.burn_in :].max() for plan in plans])
            tables["record"].append(_row(name, epsilon, worst)._replace(figure="record"))
            reach = (setting.clip / promise.sensitivity(K)[0]) ** 2
            tables["record_budget"].append(Row("record_budget", name, epsilon, float(promise.budget(K)[0] * reach)))
        return tables

    settings = {k: v for k, v in dataclasses.asdict(setting).items() if k != "posterior"}
    points = tuple(Point(float(epsilon), names) for epsilon in range(1, 21))
    return Study("record", points, names, {**settings, "data": digest(posterior)}, measure)
