"""From a scenario to the three inputs and the plan."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from wflmc import channel
from wflmc.channel import Link
from wflmc.errors import InputError, naming
from wflmc.evaluation import choose_burn_in
from wflmc.planning import Plan, Policy, plan
from wflmc.posterior import GaussianPosterior, gaussian_regression
from wflmc.privacy import Privacy
from wflmc.scenario.expression import evaluate_expression
from wflmc.scenario.files import is_data_path, load_data, load_gains
from wflmc.scenario.schema import SamplerSection, Scenario, irrelevant


class Inputs(NamedTuple):
    """What planning starts from."""

    posterior: GaussianPosterior
    link: Link
    privacy: Privacy
    step_size: float
    warnings: tuple[str, ...]


def build(scenario: Scenario) -> Inputs:
    """The three inputs of a scenario, and its step size."""
    warnings = [f"{key} has no effect: {why}." for key, why in irrelevant(scenario).items() if scenario.given(key)]
    with naming("posterior"):
        posterior = build_posterior(scenario)
        posterior, notes = _public_constants(scenario, posterior)
    with naming("link"):
        link = build_link(scenario)
    privacy = build_privacy(scenario)
    text = scenario.sampler.step_size
    names = {"mu": posterior.mu, "L": posterior.L}
    step_size = evaluate_expression("sampler.step_size", text, names) if isinstance(text, str) else text
    return Inputs(posterior, link, privacy, step_size, (*warnings, *notes))


def build_posterior(scenario: Scenario) -> GaussianPosterior:
    """The model with its data spread over the devices."""
    section = scenario.posterior
    X = y = None
    if is_data_path(section.data):
        X, y = load_data(section.data)
        found = {"examples": len(y), "dim": X.shape[1] if X.ndim == 2 else 0}
        for name, value in found.items():
            if scenario.given(f"posterior.{name}") and getattr(section, name) != value:
                raise InputError(name, getattr(section, name), f"{value}, as in the data file, or left out")
    elif section.data != "synthetic":
        raise InputError("data", section.data, "'synthetic' or the path of an .npz or .csv file")
    return gaussian_regression(
        jax.random.key(section.seed),
        section.devices,
        examples=section.examples,
        dim=section.dim,
        X=X,
        y=y,
        intercept=section.intercept,
        partition=section.partition,
        prior_std=section.prior_std,
    )


def _public_constants(scenario: Scenario, posterior: GaussianPosterior) -> tuple[GaussianPosterior, list[str]]:
    """μ and L as given in the scenario in place of the computed ones; 0 stands for "computed"."""
    section = scenario.posterior
    mu, L = section.mu or posterior.mu, section.L or posterior.L
    if mu > L:
        given, other = ("mu", f"at most L = {L:g}") if section.mu else ("L", f"at least mu = {mu:g}")
        raise InputError(given, section.mu or section.L, other)
    notes = []
    if mu > posterior.mu * (1 + 1e-12):
        notes.append(f"posterior.mu = {mu:g} is above the true {posterior.mu:.6g}: the bound does not hold.")
    if L < posterior.L * (1 - 1e-12):
        notes.append(f"posterior.L = {L:g} is below the true {posterior.L:.6g}: the bound does not hold.")
    return dataclasses.replace(posterior, mu=mu, L=L), notes


def build_privacy(scenario: Scenario) -> Privacy:
    """The promise of a scenario."""
    section = scenario.privacy
    with naming("privacy"):
        return Privacy(section.epsilon, section.delta, section.clip, section.accountant)


def build_link(scenario: Scenario) -> Link:
    """The channel of a scenario."""
    section = scenario.link
    match section.fading:
        case "static":
            fading = channel.static(section.power)
        case "rayleigh":
            fading = channel.rayleigh(section.power, section.correlation)
        case "rician":
            fading = channel.rician(section.power, section.rician_k, section.correlation)
        case "file":
            fading = channel.from_array(load_gains(section.gains))
    return Link(fading, section.snr_db, section.noise_power, section.seed)


def make_plan(scenario: Scenario, inputs: Inputs, power: Policy | None = None, solver: str = "own") -> Plan:
    """The plan of a scenario, by its own policy or a given one."""
    policy = scenario.policy
    burn_in = settle_burn_in(scenario, inputs).sampler.burn_in
    try:
        made = plan(
            inputs.posterior,
            inputs.link,
            inputs.privacy,
            step_size=inputs.step_size,
            burn_in=int(burn_in),
            samples=scenario.sampler.samples,
            power=power or policy.power,
            schedule=policy.schedule,
            objective=policy.objective,
            bound=policy.bound,
            init=scenario.sampler.init,
            initial_w2_sq=scenario.posterior.initial_w2_sq or None,
            max_round_noise=policy.max_round_noise,
            solver=solver,
        )
    except InputError as error:
        raise InputError(f"{_section_of(error)}{error.key}", error.given, error.allowed) from None
    return dataclasses.replace(made, warnings=(*inputs.warnings, *made.warnings))


def _section_of(error: InputError) -> str:
    """The section an error of planning belongs to: link for gains, else wherever the key is."""
    if error.key == "solver":
        return "--"
    if error.key == "gains" or (error.key == "power" and not isinstance(error.given, str)):
        return "link."
    return "sampler." if error.key in SamplerSection.model_fields else "policy."


def settle_burn_in(scenario: Scenario, inputs: Inputs) -> Scenario:
    """The scenario with `burn_in = "auto"` replaced by where a simulated noiseless pilot has forgotten its start."""
    section = scenario.sampler
    if section.burn_in != "auto":
        return scenario
    with naming("sampler"):
        key = jax.random.key(section.seed)
        chosen = choose_burn_in(key, inputs.posterior, inputs.step_size, section.max_burn_in)
    return scenario.model_copy(update={"sampler": section.model_copy(update={"burn_in": chosen})})
