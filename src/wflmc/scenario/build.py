"""From a scenario to the three inputs of planning: posterior, link and privacy."""

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc import channel
from wflmc.channel import Link
from wflmc.data.images import image_features, public_whitening
from wflmc.data.sets import DATA_SETS, Features, draw_images, load, mnist_features
from wflmc.dynamics import OVERDAMPED, Dynamics, by_name
from wflmc.planning.options import PlanRequest, Policy, Sampler
from wflmc.posterior import SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.posterior.inputs import check_data
from wflmc.posterior.regression import Regression
from wflmc.posterior.softmax import synthetic_labels
from wflmc.privacy import Privacy
from wflmc.privacy.whitening import Release, release_whitening
from wflmc.scenario.coverage import CONSTANTS, NotCovered, not_covered
from wflmc.scenario.files import Labels, is_data_path, load_data
from wflmc.scenario.gains import load_gains, split_variable
from wflmc.scenario.schema import LinkSection, PosteriorSection, Scenario, irrelevant
from wflmc.scenario.sections import core_value
from wflmc.support import plugins
from wflmc.support.errors import InputError, without_data
from wflmc.support.keys import host_generator, secret_key, seeded
from wflmc.support.notices import Notice, NoticeCode

MODELS = ("gaussian", "softmax")
Test = tuple[NDArray[np.float64], np.ndarray]
"""Features and targets of a test set, or labels as in the data."""
Value = float | NDArray[np.float64]

_OPERATORS: dict[type[ast.AST], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[[Value, Value], Value]] = {
    "min": np.minimum,
    "max": np.maximum,
}


@without_data
class Inputs(NamedTuple):
    """What planning starts from."""

    posterior: Posterior
    link: Link
    privacy: Privacy
    step_size: float
    notices: tuple[Notice, ...]
    test: Test | None = None
    release: Release | None = None
    """What whitening has cost, where it is paid for."""
    dynamics: Dynamics = OVERDAMPED
    not_covered: tuple[NotCovered, ...] = ()
    """What ε does not cover of runs and plans."""

    @property
    def spent(self) -> NDArray[np.float64]:
        """Loss of every device before the first round of a chain, [K]."""
        return (
            np.zeros(self.posterior.devices)
            if self.release is None
            else self.release.spent
        )

    @property
    def public(self) -> bool:
        """Whether a promise is made and no number of a plan comes from the data: then a plan says nothing of them."""
        return self.privacy.epsilon is not None and not any(
            item.name in CONSTANTS for item in self.not_covered
        )


THESE_DATA = "these data"


def build(
    scenario: Scenario, key: jax.Array | None = None, data_words: str = THESE_DATA
) -> Inputs:
    """Return the three inputs of a scenario, the step size of its last round, and its dynamics.

    Args:
        scenario: of which the inputs are.
        key: the noise of a release that whitens, where the scenario's seed is secret; drawn by default.
        data_words: what the scenario's data are, in the words of notices.
    """
    notices = [
        Notice(NoticeCode.NO_EFFECT, f"{name} has no effect: {reason}.")
        for name, reason in irrelevant(scenario).items()
        if scenario.given(name)
    ]
    link, privacy = build_link(scenario), build_privacy(scenario)
    posterior, test = build_posterior(scenario)
    posterior, release = _preconditioned(scenario, posterior, link, privacy, key)
    notices += _constant_notices(scenario, posterior, data_words)
    mu = scenario.posterior.mu or posterior.mu
    L = scenario.posterior.L or posterior.L
    posterior = dataclasses.replace(posterior, mu=mu, L=L)
    step_size = float(np.ravel(step_sizes(scenario, posterior))[-1])
    dynamics = by_name(scenario.sampler.dynamics, _friction(scenario, mu, L))
    if release is not None and release.hidden > 0.5:
        text = (
            f"Noise hides {release.hidden:.0%} of the features' directions from the release, which leaves them as they "
            "are: a higher SNR, more whiten_rounds or whiten_share, or a whiten_clip nearer to the features' size help."
        )
        notices.append(Notice(NoticeCode.HIDDEN_DIRECTIONS, text))
    uncovered = not_covered(
        scenario, scored=test is not None, by_model=posterior.not_covered
    )
    return Inputs(
        posterior,
        link,
        privacy,
        step_size,
        tuple(notices),
        test,
        release,
        dynamics,
        uncovered,
    )


def _friction(scenario: Scenario, mu: float, L: float) -> float:
    """Return γ_f of a scenario; only kinetic dynamics read an expression."""
    friction = scenario.sampler.friction
    if not isinstance(friction, str):
        return float(friction)
    if scenario.sampler.dynamics != "kinetic":
        return Sampler.friction
    return float(evaluate_expression("sampler.friction", friction, {"mu": mu, "L": L}))


def step_sizes(scenario: Scenario, posterior: Posterior) -> Value:
    """Return η of a scenario: a number, or an array [S] where it changes with the round."""
    section = scenario.sampler
    if isinstance(section.step_size, list) and section.burn_in == "auto":
        raise InputError(
            "sampler.burn_in",
            "auto",
            "a number with a sampler.step_size for every round",
        )
    if not isinstance(section.step_size, str):
        return (
            section.step_size
            if isinstance(section.step_size, float)
            else np.array(section.step_size)
        )
    names: dict[str, Value] = {"mu": posterior.mu, "L": posterior.L}
    if section.burn_in != "auto":  # which a pilot with this step size finds
        rounds = section.burn_in + section.samples
        names |= {
            "s": np.arange(1.0, rounds + 1),
            "S": float(rounds),
            "S_b": float(section.burn_in),
        }
    return evaluate_expression("sampler.step_size", section.step_size, names)


def evaluate_expression(key: str, text: str, names: Mapping[str, Value]) -> Value:
    """Return the value of an expression of numbers, + - * / **, brackets, min, max and names, of numbers or arrays.

    A comparison (< <= > >=) is 1 where it holds and 0 elsewhere.

    >>> evaluate_expression("step_size", "0.4/(mu+L)", {"mu": 1.0, "L": 3.0})
    0.1
    >>> evaluate_expression("step_size", "min(0.2, 0.1*(1+3*(s<=2)))", {"s": np.arange(1.0, 5.0)})
    array([0.2, 0.2, 0.1, 0.1])
    """
    allowed = f"a number, or arithmetic (+ - * / **, brackets, min, max and < <= > >=) in {', '.join(names)}"

    def value(node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=number) if isinstance(
                number, int | float
            ) and not isinstance(number, bool):
                return float(number)
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if (
                type(op) in _OPERATORS
            ):
                result = _OPERATORS[type(op)](value(left), value(right))
                if not isinstance(result, complex):
                    return 1.0 * result
            case ast.Call(
                func=ast.Name(id=name), args=[_, *_] as parts, keywords=[]
            ) if name in _CALLS:
                return functools.reduce(_CALLS[name], map(value, parts))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return -value(operand) if isinstance(sign, ast.USub) else value(operand)
        raise ValueError

    if len(text) > 200:
        raise InputError(key, text, "at most 200 characters long")
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise InputError(key, text, allowed) from None


def build_posterior(scenario: Scenario) -> tuple[Posterior, Test | None]:
    """Return the model with its data spread over the devices, and the test set if any.

    Args:
        scenario: of which the section `posterior` is used.

    Raises:
        InputError: names the key of that section.
    """
    if scenario.posterior.model not in MODELS:
        return _own_model(scenario.posterior), None
    try:
        return _regression(scenario)
    except InputError as error:  # about an argument, which has the name of the key
        raise error.of_section("posterior", PosteriorSection.model_fields) from None


def _regression(scenario: Scenario) -> tuple[Posterior, Test | None]:
    """Return one of our own models, and the test set where there is one."""
    section = scenario.posterior
    key = seeded(section.seed)
    data, columns = _load(scenario, key)
    common = section.model_dump(include={"examples", "dim", "partition", "prior_std"})
    common["intercept"] = section.adds_ones
    if data is not None:
        common |= {"X": data.X, "y": data.y}
    if section.model == "gaussian":
        posterior: Regression = gaussian_regression(key, section.devices, **common)
    else:
        # The ten classes of images are no secret; of other data the labels are, unless they are declared.
        classes = (
            10
            if section.data in DATA_SETS and section.classes is None
            else section.classes
        )
        posterior = softmax_regression(key, section.devices, classes=classes, **common)
    test = _test_set(section, key, posterior, data)
    return dataclasses.replace(posterior, columns=columns), test


def _own_model(section: PosteriorSection) -> Posterior:
    """Return the posterior of a model of one's own."""
    if section.preconditioner != "none":
        raise InputError(
            "posterior.preconditioner",
            section.preconditioner,
            "none: a model of your own brings its own",
        )
    posterior = plugins.build_custom_model(
        section.model, section.model_dump(exclude_unset=True)
    )
    check_posterior(posterior)
    return posterior


def _load(
    scenario: Scenario, key: jax.Array
) -> tuple[Features | None, tuple[str, ...]]:
    """Return the scenario's data set and its features' names; None where the model makes its own."""
    section = scenario.posterior
    if section.data == "synthetic":
        return None, ()
    if section.data in DATA_SETS:
        images, generator = load(section.data), host_generator(key, "data")
        if section.features == "scattering":
            chosen = draw_images(images, generator, section.examples)
            by = section.whiten_from, section.whiten_ridge
            return image_features(section.data, *by, section.intercept, chosen), ()
        return mnist_features(images, generator, section.examples, section.dim), ()
    if not is_data_path(section.data):
        allowed = (
            "'fashion-mnist', 'synthetic', 'mnist' or the path of an .npz or .csv file"
        )
        raise InputError("data", section.data, allowed)
    examples = section.examples if scenario.given("posterior.examples") else None
    data, columns = load_data(section.data, _label_kind(section), examples)
    for name, value in {
        "examples": len(data.y),
        "dim": data.X.shape[1] if data.X.ndim == 2 else 0,
    }.items():
        if scenario.given(f"posterior.{name}") and getattr(section, name) != value:
            raise InputError(
                name,
                getattr(section, name),
                f"{value}, as in the data file, or left out",
            )
    if not section.whiten_from:
        return data, columns
    if not is_data_path(section.whiten_from):
        raise InputError(
            "whiten_from",
            section.whiten_from,
            "the path of an .npz or .csv file with public rows",
        )
    whitening = public_whitening(
        load_data(section.whiten_from)[0].X, section.whiten_ridge
    )
    X_test = None if data.X_test is None else whitening(data.X_test, section.intercept)
    return Features(
        whitening(data.X, section.intercept), data.y, X_test, data.y_test
    ), ()


def _label_kind(section: PosteriorSection) -> Labels:
    """Return what the targets of a file are: as posterior.classes declares, or inferred."""
    if section.model != "softmax":
        return "numbers"
    if section.classes is None:
        return "inferred"
    declared = (
        [section.classes] if isinstance(section.classes, int) else section.classes
    )
    return "text" if any(isinstance(name, str) for name in declared) else "numbers"


def _test_set(
    section: PosteriorSection,
    key: jax.Array,
    posterior: Regression,
    data: Features | None,
) -> Test | None:
    """Return features and targets to test predictions on, checked against the model; None where there are none."""
    if data is None:
        if not isinstance(posterior, SoftmaxPosterior):
            return None
        u, v = synthetic_labels(
            key, section.examples, section.dim, posterior.classes, stream="test"
        )
        return u, np.asarray(posterior.class_names)[v]
    if data.X_test is None or data.y_test is None:
        return None
    try:
        target = (
            posterior.classes_of(data.y_test)
            if isinstance(posterior, SoftmaxPosterior)
            else data.y_test
        )
        features, _ = check_data(data.X_test, target)
        posterior.design_matrix(features)
    except InputError as error:
        given = f"a test set (X_test, y_test) with {error.value}"
        raise InputError(error.key, given, error.requirement, error.section) from None
    return features, data.y_test


def _preconditioned(
    scenario: Scenario,
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    key: jax.Array | None,
) -> tuple[Posterior, Release | None]:
    """Return the posterior in the coordinates that the scenario asks for, and what they have cost."""
    section = scenario.posterior
    if section.preconditioner == "none":
        return posterior, None
    assert isinstance(posterior, Regression)  # a custom model brings its own
    if section.preconditioner == "whiten":
        return posterior.whitened(prior_on=section.prior_on), None
    if scenario.sampler.seed != "secret":
        key = seeded(section.seed)
    release = release_whitening(
        secret_key() if key is None else key,
        posterior,
        link,
        privacy,
        clip=section.whiten_clip or None,
        budget_fraction=section.whiten_share,
        rounds=section.whiten_rounds,
        prior_on=section.prior_on,
    )
    return posterior.whitened(release.matrix, section.prior_on), release


def _constant_notices(
    scenario: Scenario, posterior: Posterior, data_words: str
) -> Iterator[Notice]:
    """Yield what is odd about μ and L as the scenario gives them (0 stands for "computed"), and about the classes."""
    section = scenario.posterior
    mu, L = section.mu or posterior.mu, section.L or posterior.L
    if mu > L:
        key, limit = ("mu", "at most L") if section.mu else ("L", "at least mu")
        raise InputError(
            f"posterior.{key}", section.mu or section.L, limit
        )  # which the data may tell, and this not
    if isinstance(posterior, SoftmaxPosterior):
        empty = (
            posterior.classes - np.unique(posterior.real_rows(posterior.labels)).size
        )
        if empty:
            text = f"{empty} of {posterior.classes} classes have no example in {data_words}."
            yield Notice(NoticeCode.EMPTY_CLASSES, text)
    if mu > posterior.mu * (1 + 1e-12):
        text = (
            f"posterior.mu = {mu:g} is too large for {data_words}: the bound may fail."
        )
        yield Notice(NoticeCode.CONSTANT_TOO_LARGE, text)
    if L < posterior.L * (1 - 1e-12):
        text = f"posterior.L = {L:g} is too small for {data_words}: the bound may fail."
        yield Notice(NoticeCode.CONSTANT_TOO_SMALL, text)


def build_privacy(scenario: Scenario) -> Privacy:
    """Return the promise of a scenario."""
    section = scenario.privacy
    # With unit = "device" the key has no effect, and a warning says so.
    example_clip = section.example_clip if section.unit == "record" else None
    return core_value(Privacy, section, example_clip=example_clip)


def build_link(scenario: Scenario) -> Link:
    """Return the channel of a scenario."""
    return core_value(Link, scenario.link, fading=_fading(scenario.link))


def build_sampler(scenario: Scenario, inputs: Inputs) -> Sampler:
    """Return the chain of a scenario.

    Args:
        scenario: of which the section `sampler` is used.
        inputs: as `build` returns them; what a release has sent comes before the chain.
    """
    return core_value(
        Sampler,
        scenario.sampler,
        dynamics=inputs.dynamics,
        friction=Sampler.friction,  # which the dynamics have already
        start=0 if inputs.release is None else len(inputs.release.loss),
    )


def build_policy(scenario: Scenario) -> Policy:
    """Return the policy of a scenario."""
    section = scenario.policy
    limit = np.inf if section.max_round_noise == "inf" else section.max_round_noise
    return core_value(Policy, section, max_round_noise=limit)


def plan_request(
    scenario: Scenario, inputs: Inputs, ledger: ArrayLike | None = None
) -> PlanRequest:
    """Return what the plan of a scenario is made for.

    Args:
        scenario: whose burn-in is a number.
        inputs: as `build` returns them.
        ledger: what devices have spent before, [K], a release that whitening took
            included; None for that release alone.

    Returns:
        The request, of which `wflmc.planning.plan_from` makes the plan.

    Raises:
        InputError: keys contradict each other.
    """
    section = scenario.sampler
    return PlanRequest(
        link=inputs.link,
        privacy=inputs.privacy,
        step_size=step_sizes(scenario, inputs.posterior),
        burn_in=int(section.burn_in),
        samples=section.samples,
        sampler=build_sampler(scenario, inputs),
        policy=build_policy(scenario),
        ledger=inputs.spent if ledger is None else ledger,
        initial_w2_sq=scenario.posterior.initial_w2_sq or None,
    )


def _fading(section: LinkSection) -> channel.Fading:
    """Return the fading law that a section names: one of ours, or of another package."""
    power = section.power
    match section.fading:
        case "file":
            return _gains_from_file(section.gains)
        case "static":
            return channel.static(power)
        case "rayleigh":
            return channel.rayleigh(power, section.correlation)
        case "rician":
            return channel.rician(power, section.rician_k, section.correlation)
    law: channel.Fading = plugins.load(
        "fading", section.fading, "fading", {}, section="link"
    )(power)
    return law


def _gains_from_file(gains: str) -> channel.Fading:
    """Return the channel whose gains a file holds; errors name the file."""
    table = load_gains(gains)
    file = split_variable(gains)
    source = file._replace(path=Path(file.path).name)
    return channel.from_array(table, source=str(source))
