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
from wflmc.data.images import Whitening, image_features
from wflmc.data.sets import DATA_SETS, Features, draw_images, load, mnist_features
from wflmc.dynamics import OVERDAMPED, Dynamics, by_name
from wflmc.planning.options import PlanRequest, Policy, Sampler
from wflmc.posterior import SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.posterior.inputs import Names, check_data, class_names
from wflmc.posterior.regression import Regression
from wflmc.posterior.softmax import synthetic_labels
from wflmc.privacy import Privacy
from wflmc.privacy.whitening import Release, release_whitening
from wflmc.scenario.coverage import (
    CONSTANTS,
    EXACT_OBJECTIVE,
    NotCovered,
    not_covered,
)
from wflmc.scenario.files import is_data_path, label_kind, load_data
from wflmc.scenario.gains import load_gains, split_variable
from wflmc.scenario.public import (
    check_public_files,
    fit_prior_mean,
    load_public_images,
    load_public_rows,
    whitening_of_files,
)
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
    prior_mean: NDArray[np.float64] | None = None
    """θ₀[m] as it was fitted to public rows, in parameters; None for zero."""

    @property
    def spent(self) -> NDArray[np.float64]:
        """Privacy loss of every device before the first round of a chain, [K].

        It is that of the release that whitens, and 0 without one.
        """
        if self.release is None:
            return np.zeros(self.posterior.devices)
        return self.release.spent

    @property
    def public(self) -> bool:
        """Whether a promise is made and no number of a plan is computed from the data.

        The shape of the data, such as how many examples each device has, counts as
        public here.
        """
        if self.privacy.epsilon is None:
            return False
        sources = (*CONSTANTS, EXACT_OBJECTIVE)
        return not any(item.name in sources for item in self.not_covered)


THESE_DATA = "these data"
"""What notices call the data of a scenario."""
MANY_HIDDEN_DIRECTIONS = 0.5
"""Fraction of directions that noise hides from a release, with a notice above it."""
MAX_EXPRESSION_CHARACTERS = 200
"""Of an expression in a scenario; longer ones could exhaust the parser."""
PUBLIC_CLASSES = 10
"""Of MNIST, Fashion-MNIST and synthetic data, if a scenario declares no others."""
ROUNDING = 1e-12
"""Relative difference up to which a constant counts as that of the data."""
DATA_SOURCES = (
    "'synthetic', 'mnist', 'fashion-mnist', 'rendered-digits' or the path of an .npz "
    "or .csv file"
)


def build(
    scenario: Scenario,
    key: jax.Array | None = None,
    data_words: str = THESE_DATA,
    *,
    exact: bool = False,
    release: Release | None = None,
) -> Inputs:
    """Return the inputs of planning for a scenario.

    They are posterior, link and privacy, the step size of the last round, the dynamics,
    and what users should know about them. Data are loaded or drawn, and a release that
    whitens is made.

    Args:
        scenario: as `validate` returns it.
        key: of the noise of a release that whitens, where the scenario's seed is
            secret; drawn by default.
        data_words: what notices call the scenario's data.
        exact: as of `release_whitening`: the release that whitens has noise that
            protects, whatever the scenario's seeds.
        release: one that was made for this scenario before; by default it is made now,
            where the scenario asks for one.

    Returns:
        The inputs, with what ε does not cover of them.

    Raises:
        InputError: names the key that is wrong, or that contradicts the data.
    """
    notices = [
        Notice(NoticeCode.NO_EFFECT, f"{name} has no effect: {reason}.")
        for name, reason in irrelevant(scenario).items()
        if scenario.is_set(name)
    ]
    link = build_link(scenario)
    privacy = build_privacy(scenario)
    posterior, test = build_posterior(scenario)
    prior_mean = None
    if isinstance(posterior, Regression):
        prior_mean = posterior.prior_mean
    if release is None:
        release = _release(scenario, posterior, link, privacy, key=key, exact=exact)
    posterior = _preconditioned(scenario, posterior, release)
    notices += _constant_notices(scenario, posterior, data_words)
    mu = scenario.posterior.mu or posterior.mu
    L = scenario.posterior.L or posterior.L
    posterior = dataclasses.replace(posterior, mu=mu, L=L)
    step_size = float(np.ravel(step_sizes(scenario, posterior))[-1])
    dynamics = by_name(scenario.sampler.dynamics, _friction(scenario, mu, L))
    if release is not None and release.hidden > MANY_HIDDEN_DIRECTIONS:
        text = (
            f"Noise hides {release.hidden:.0%} of the features' directions from the "
            "release, which leaves them as they are: a higher SNR, more whiten_rounds "
            "or whiten_share, or a whiten_clip nearer to the features' size help."
        )
        notices.append(Notice(NoticeCode.HIDDEN_DIRECTIONS, text))
    uncovered = not_covered(
        scenario, scored=test is not None, by_model=posterior.not_covered
    )
    return Inputs(
        posterior=posterior,
        link=link,
        privacy=privacy,
        step_size=step_size,
        notices=tuple(notices),
        test=test,
        release=release,
        dynamics=dynamics,
        not_covered=uncovered,
        prior_mean=prior_mean,
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
    """Return the step size η of a scenario.

    Args:
        scenario: of which the section `sampler` is used.
        posterior: whose μ and L an expression may use.

    Returns:
        A number, or an array [S] where the step size changes with the round.

    Raises:
        InputError: the expression is wrong, or a list stands beside burn_in = "auto".
    """
    section = scenario.sampler
    if isinstance(section.step_size, list) and section.burn_in == "auto":
        requirement = "a number with a sampler.step_size for every round"
        raise InputError("sampler.burn_in", "auto", requirement)
    if isinstance(section.step_size, float):
        return section.step_size
    if not isinstance(section.step_size, str):
        return np.array(section.step_size)
    names: dict[str, Value] = {"mu": posterior.mu, "L": posterior.L}
    # The pilot that finds the number of burn-in rounds runs with this step size, which
    # therefore cannot depend on that number.
    if section.burn_in != "auto":
        rounds = section.burn_in + section.samples
        names |= {
            "s": np.arange(1.0, rounds + 1),
            "S": float(rounds),
            "S_b": float(section.burn_in),
        }
    return evaluate_expression("sampler.step_size", section.step_size, names)


def evaluate_expression(key: str, text: str, names: Mapping[str, Value]) -> Value:
    """Return the value of an arithmetic expression.

    It may have numbers, + - * / **, brackets, min, max, names, and comparisons with <,
    <=, > or >=, which are 1 where they hold and 0 elsewhere. Nothing else is evaluated.

    Args:
        key: of a scenario, for errors.
        text: the expression.
        names: numbers or arrays that it may use.

    Returns:
        A number, or an array where a name is one.

    Raises:
        InputError: the text is no such expression, or divides by 0 or overflows.

    >>> evaluate_expression("step_size", "0.4/(mu+L)", {"mu": 1.0, "L": 3.0})
    0.1
    >>> rounds = {"s": np.arange(1.0, 5.0)}
    >>> evaluate_expression("step_size", "min(0.2, 0.1*(1+3*(s<=2)))", rounds)
    array([0.2, 0.2, 0.1, 0.1])
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        requirement = f"at most {MAX_EXPRESSION_CHARACTERS} characters long"
        raise InputError(key, text, requirement)
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return _evaluate(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        requirement = (
            "a number, or arithmetic (+ - * / **, brackets, min, max and < <= > >=) in "
            f"{', '.join(names)}"
        )
        raise InputError(key, text, requirement) from None


def _evaluate(node: ast.expr, names: Mapping[str, Value]) -> Value:
    """Return the value of a parsed expression; ValueError for one of another kind."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if (
            type(op) in _OPERATORS
        ):
            operands = (_evaluate(left, names), _evaluate(right, names))
            result = _OPERATORS[type(op)](*operands)
            # A root of a negative number is complex, and is refused.
            if not isinstance(result, complex):
                return 1.0 * result  # comparisons become 0 or 1
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as parts, keywords=[]) if (
            name in _CALLS
        ):
            values = [_evaluate(part, names) for part in parts]
            return functools.reduce(_CALLS[name], values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, names)
    raise ValueError


def build_posterior(scenario: Scenario) -> tuple[Posterior, Test | None]:
    """Return the model with its data spread over the devices, and the test set if any.

    Args:
        scenario: of which the section `posterior` is used.

    Returns:
        The posterior, in the coordinates of the model; and features and targets of the
        test set, or None.

    Raises:
        InputError: names the key of that section.
    """
    if scenario.posterior.model not in MODELS:
        return _custom_model(scenario.posterior), None
    try:
        return _regression(scenario)
    except InputError as error:  # about an argument, which has the name of the key
        raise error.of_section("posterior", PosteriorSection.model_fields) from None


def _regression(scenario: Scenario) -> tuple[Posterior, Test | None]:
    """Return a built-in model, and the test set where there is one."""
    section = scenario.posterior
    key = seeded(section.seed)
    loaded = _load(scenario, key)
    data = loaded.private
    common = section.model_dump(include={"examples", "dim", "partition", "prior_std"})
    common["intercept"] = section.adds_ones
    if data is not None:
        common |= {"X": data.X, "y": data.y}
    if section.model == "gaussian":
        prior_mean = _prior_mean(section, loaded, names=())
        posterior: Regression = gaussian_regression(
            key, section.devices, prior_mean=prior_mean, **common
        )
    else:
        names = _class_names(section, data)
        prior_mean = _prior_mean(section, loaded, names)
        posterior = softmax_regression(
            key, section.devices, classes=names, prior_mean=prior_mean, **common
        )
    test = _test_set(section, key, posterior, data)
    return dataclasses.replace(posterior, columns=loaded.columns), test


def _class_names(section: PosteriorSection, data: Features | None) -> Names:
    """Return the labels of all classes.

    The classes of images are public; those of other data are not, unless they are
    declared.
    """
    classes = section.classes
    if classes is None and (data is None or section.data in DATA_SETS):
        classes = PUBLIC_CLASSES
    return class_names(() if data is None else data.y, classes)


def _prior_mean(
    section: PosteriorSection, loaded: "_Loaded", names: Names
) -> NDArray[np.float64] | None:
    """Return the mode of the model on the public rows; None where there are none."""
    if loaded.public is None:
        return None
    return fit_prior_mean(section, loaded.public, names)


class _Loaded(NamedTuple):
    """What is read from the files of a scenario, as the model takes it."""

    private: Features | None
    """The data set; None where the model makes its own."""
    columns: tuple[str, ...] = ()
    """The names of its features, which whitened ones do not have."""
    public: Features | None = None
    """Labelled rows that the prior is fitted to; None for a prior around zero."""


def _custom_model(section: PosteriorSection) -> Posterior:
    """Return the posterior of a custom model."""
    preconditioner = section.preconditioner
    if preconditioner != "none":
        requirement = "none: a model of your own brings its own"
        raise InputError("posterior.preconditioner", preconditioner, requirement)
    keys = section.model_dump(exclude_unset=True)
    posterior = plugins.build_custom_model(section.model, keys)
    check_posterior(posterior)
    return posterior


def _load(scenario: Scenario, key: jax.Array) -> _Loaded:
    """Return the scenario's data set, and the public rows of its prior."""
    section = scenario.posterior
    has_public_prior = bool(section.prior_from)
    check_public_files(section)
    public = None
    if section.data == "synthetic":
        if has_public_prior:
            public = load_public_rows(section, (), section.dim)
        return _Loaded(private=None, public=public)
    if section.data in DATA_SETS:
        if has_public_prior:
            public = load_public_images(section)
        return _Loaded(private=_load_images(section, key), public=public)
    if not is_data_path(section.data):
        raise InputError("data", section.data, DATA_SOURCES)
    examples = section.examples if scenario.is_set("posterior.examples") else None
    data, columns = load_data(section.data, label_kind(section), examples)
    sizes = {
        "examples": len(data.y),
        "dim": data.X.shape[1] if data.X.ndim == 2 else 0,
    }
    for name, size in sizes.items():
        value = getattr(section, name)
        if scenario.is_set(f"posterior.{name}") and value != size:
            raise InputError(name, value, f"{size}, as in the data file, or left out")
    width = sizes["dim"]
    if has_public_prior:
        public = load_public_rows(section, columns, width)
    if not section.whiten_from:
        return _Loaded(data, columns, public)
    whitening = whitening_of_files(section, columns, width)
    if public is not None:
        public = _whiten(section, public, whitening)
    return _Loaded(private=_whiten(section, data, whitening), public=public)


def _load_images(section: PosteriorSection, key: jax.Array) -> Features:
    """Return the features of images that are drawn from a data set."""
    images = load(section.data)
    generator = host_generator(key, "data")
    if section.features != "scattering":
        return mnist_features(images, generator, section.examples, section.dim)
    drawn = draw_images(images, generator, section.examples)
    return image_features(
        section.data,
        section.whitening_sources,
        section.whiten_ridge,
        section.intercept,
        drawn,
    )


def _whiten(
    section: PosteriorSection, data: Features, whitening: Whitening
) -> Features:
    """Return features that public rows whiten."""
    X_test = data.X_test
    if X_test is not None:
        X_test = whitening(X_test, section.intercept)
    X = whitening(data.X, section.intercept)
    return Features(X, data.y, X_test, data.y_test)


def _test_set(
    section: PosteriorSection,
    key: jax.Array,
    posterior: Regression,
    data: Features | None,
) -> Test | None:
    """Return features and targets to test predictions on, checked against the model.

    None where there are none.
    """
    if data is None:
        if not isinstance(posterior, SoftmaxPosterior):
            return None
        features, labels = synthetic_labels(
            key, section.examples, section.dim, posterior.classes, stream="test"
        )
        return features, np.asarray(posterior.class_names)[labels]
    if data.X_test is None or data.y_test is None:
        return None
    try:
        target = data.y_test
        if isinstance(posterior, SoftmaxPosterior):
            target = posterior.classes_of(data.y_test)
        features, _ = check_data(data.X_test, target)
        posterior.design_matrix(features)
    except InputError as error:
        value = f"a test set (X_test, y_test) with {error.value}"
        raise InputError(error.key, value, error.requirement, error.section) from None
    return features, data.y_test


def _release(
    scenario: Scenario,
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    *,
    key: jax.Array | None,
    exact: bool,
) -> Release | None:
    """Return the release that whitens; None where the scenario asks for none.

    Args:
        scenario: whose `posterior.preconditioner` decides.
        posterior: in the coordinates of its parameters.
        link: over which the release is sent.
        privacy: the promise that pays for it.
        key: of simulated noise, used only where the scenario's seed is secret; else
            that noise has the key of `posterior.seed`. None draws one.
        exact: draw noise that protects instead.
    """
    section = scenario.posterior
    if section.preconditioner != "private-whiten":
        return None
    assert isinstance(posterior, Regression)  # a custom model brings its own
    if scenario.sampler.seed != "secret":
        key = seeded(section.seed)
    return release_whitening(
        secret_key() if key is None else key,
        posterior,
        link,
        privacy,
        clip=section.whiten_clip or None,
        budget_fraction=section.whiten_share,
        rounds=section.whiten_rounds,
        prior_on=section.prior_on,
        exact=exact,
    )


def _preconditioned(
    scenario: Scenario, posterior: Posterior, release: Release | None
) -> Posterior:
    """Return the posterior in the coordinates of the scenario.

    Args:
        scenario: whose `posterior.preconditioner` decides.
        posterior: in the coordinates of its parameters.
        release: whose matrix whitens, where whitening is paid for.
    """
    section = scenario.posterior
    if section.preconditioner == "none":
        return posterior
    assert isinstance(posterior, Regression)  # a custom model brings its own
    if section.preconditioner == "whiten":
        return posterior.whitened(prior_on=section.prior_on)
    assert release is not None
    return posterior.whitened(release.matrix, section.prior_on)


def _constant_notices(
    scenario: Scenario, posterior: Posterior, data_words: str
) -> Iterator[Notice]:
    """Yield notices about μ and L as the scenario has them, and about empty classes.

    A constant of 0 in the scenario is computed from the data. Labels are looked at.

    Raises:
        InputError: μ exceeds L.
    """
    section = scenario.posterior
    mu = section.mu or posterior.mu
    L = section.L or posterior.L
    if mu > L:
        # The error shows the scenario's number, never the one that is computed from
        # the data.
        if section.mu:
            raise InputError("posterior.mu", section.mu, "at most L")
        raise InputError("posterior.L", section.L, "at least mu")
    if isinstance(posterior, SoftmaxPosterior):
        labels = posterior.real_rows(posterior.labels)
        empty = posterior.classes - np.unique(labels).size
        if empty:
            classes = f"{empty} of {posterior.classes} classes"
            text = f"{classes} have no example in {data_words}."
            yield Notice(NoticeCode.EMPTY_CLASSES, text)
    if mu > posterior.mu * (1 + ROUNDING):
        text = (
            f"posterior.mu = {mu:g} is too large for {data_words}: the bound may fail."
        )
        yield Notice(NoticeCode.CONSTANT_TOO_LARGE, text)
    if L < posterior.L * (1 - ROUNDING):
        text = f"posterior.L = {L:g} is too small for {data_words}: the bound may fail."
        yield Notice(NoticeCode.CONSTANT_TOO_SMALL, text)


def build_privacy(scenario: Scenario) -> Privacy:
    """Return the promise of a scenario, as the Python API takes it.

    Raises:
        InputError: keys of the section `privacy` contradict each other.
    """
    section = scenario.privacy
    # With unit = "device" the key has no effect, and a warning says so.
    example_clip = section.example_clip if section.unit == "record" else None
    return core_value(Privacy, section, example_clip=example_clip)


def build_link(scenario: Scenario) -> Link:
    """Return the channel of a scenario; a file of gains is read.

    Raises:
        InputError: the file cannot be read, or keys of the section `link` contradict
            each other.
    """
    return core_value(Link, scenario.link, fading=_fading(scenario.link))


def build_sampler(scenario: Scenario, inputs: Inputs) -> Sampler:
    """Return the chain of a scenario.

    Args:
        scenario: of which the section `sampler` is used.
        inputs: as `build` returns them; rounds of a release come before the chain.

    Returns:
        The sampler, with the dynamics of the inputs.
    """
    # The dynamics have the friction already, with an expression evaluated.
    return core_value(
        Sampler,
        scenario.sampler,
        dynamics=inputs.dynamics,
        friction=Sampler.friction,
        start=0 if inputs.release is None else len(inputs.release.loss),
    )


def build_policy(scenario: Scenario) -> Policy:
    """Return the policy of a scenario; the text "inf" becomes infinity."""
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
    """Return the fading law that a section names, built in or of another package."""
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
    registered = plugins.load("fading", section.fading, "fading", {}, section="link")
    law: channel.Fading = registered(power)
    return law


def _gains_from_file(gains: str) -> channel.Fading:
    """Return the channel whose gains a file holds.

    Errors name the file without its folder.
    """
    table = load_gains(gains)
    file = split_variable(gains)
    source = file._replace(path=Path(file.path).name)
    return channel.from_array(table, source=str(source))
