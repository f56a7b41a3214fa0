"""A scenario in sentences: who holds what, over which channel, with which promise, sampled how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy import HIDDEN
from wflmc.report.blocks import number
from wflmc.report.explorer import MOST_DEVICES, MOST_DIM, MOST_ROUNDS
from wflmc.runs.documents import PlanFile
from wflmc.runs.folder import Run
from wflmc.scenario import Scenario

DATA = {"synthetic": "synthetic data", "mnist": "MNIST"}
PARTITIONS = {
    "iid": "distributed at random",
    "blocks": "distributed in the order of the file",
    "by-label": "sorted by outcome, so that no two devices hold alike data",
    "dirichlet": "distributed unevenly (Dirichlet)",
}
MODELS = {
    "gaussian": "Linear regression with unit noise",
    "softmax": "Multinomial logistic (softmax) regression",
}
WHITENING = {
    "none": "",
    "whiten": " Chains move in whitened coordinates, from statistics of the features that are taken as public.",
    "private-whiten": " Chains move in whitened coordinates, from statistics paid for with the same privacy budget.",
}
POLICIES = {
    "optimized": "Powers minimise {objective}, within power limits and privacy budgets.",
    "equal": "Every round spends the same share of the privacy budget, or has the same power where there is none.",
    "no-dp": "Powers ignore the privacy budget: only power limits count.",
    "noiseless-dp": "The link is ideal, and the only noise is what privacy and sampling need.",
    "noiseless": "The link is ideal and nothing is clipped: plain Langevin sampling, for comparison, with no privacy.",
}
SCHEDULES = {
    "threshold": "In each round the devices whose channel is above a threshold transmit, the others stay silent.",
    "all": "All devices transmit in every round.",
    "unbiased": "In each round equally many devices transmit, and every device participates equally often.",
}
OBJECTIVES = {
    "worst": "the bound of the worst kept round",
    "average": "the average of the bound over the kept rounds",
    "exact": "the exact W2² of the worst kept round",
}
IDEAL = ("noiseless", "noiseless-dp")


def scenario_rows(scenario: Scenario, run: Run) -> list[tuple[str, str]]:
    """Return the scenario of a run in sentences, each with what it is about."""
    return [
        ("Devices and data", data_words(scenario, run)),
        ("Model", model_words(scenario, run)),
        ("Channel", channel_words(scenario)),
        ("Promise", promise_words(scenario)),
        ("Sampler", sampler_words(scenario, run.plan)),
        ("Participation and power", policy_words(scenario, run.plan)),
    ]


def spread(values: float | Sequence[float] | None) -> str:
    """Return one number, or the smallest and the largest of several."""
    if values is None:
        return "–"
    low, high = number(float(np.min(values)), 4), number(float(np.max(values)), 4)
    return low if low == high else f"{low} to {high}"


def data_words(scenario: Scenario, run: Run) -> str:
    """Return who holds which data."""
    section = scenario.posterior
    held: Any = None if run.rebuilt is None else run.rebuilt.inputs.posterior.sizes
    examples = "examples" if held is None else f"{int(held.sum()):,} examples ({spread(held)} each)"
    source = DATA.get(section.data, PurePath(section.data).name)
    kind, _, concentration = section.partition.partition(":")
    how = PARTITIONS.get(kind, section.partition) + (f", A = {concentration}" if concentration else "")
    return f"{section.devices:,} devices hold {examples} of {source}, {how}."


def model_words(scenario: Scenario, run: Run) -> str:
    """Return what is sampled."""
    section, words = scenario.posterior, MODELS[scenario.posterior.model]
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    if isinstance(posterior, SoftmaxPosterior):
        names = [str(name) for name in posterior.class_names]
        words += f" into {len(names)} classes ({', '.join(names[:10])}{', …' * (len(names) > 10)})"
    words += ", with an intercept" * section.intercept
    words += f"; the prior has standard deviation {number(section.prior_std)} in each parameter."
    if run.plan is not None:
        c = run.plan.constants
        words += f" {c.dim:,} parameters; the curvature lies between μ = {number(c.mu)} and L = {number(c.L)}."
    return words + WHITENING[section.preconditioner]


def channel_words(scenario: Scenario) -> str:
    """Return the link between devices and server."""
    link = scenario.link
    if scenario.policy.power in IDEAL:
        return "An ideal link: the server receives the sum of the gradients without noise."
    kinds = {
        "static": f"Static channels, power gain |h|² = {spread(link.power)}",
        "rayleigh": f"Rayleigh fading, mean power gain E|h|² = {spread(link.power)}",
        "rician": f"Rician fading with K-factor {number(link.rician_k)}, mean power gain E|h|² = {spread(link.power)}",
        "file": f"Channel gains from {PurePath(link.gains).name}",
    }
    words = f"{kinds[link.fading]}, at an SNR of {spread(link.snr_db)} dB (transmit power per parameter over noise)."
    if link.correlation and link.fading in ("rayleigh", "rician"):
        words += f" Successive rounds are correlated by {number(link.correlation)}."
    if link.csi_error:
        words += (
            f" Devices know their channels up to an error of {number(link.csi_error)}; the worst case is accounted."
        )
    if link.downlink_snr_db < float("inf"):
        words += f" The server's broadcast has an SNR of {number(link.downlink_snr_db)} dB."
    return words + " Active devices transmit at once, and the server receives the sum of their gradients in noise."


def promise_words(scenario: Scenario) -> str:
    """Return what devices are promised, and how gradients are clipped for it."""
    privacy, power = scenario.privacy, scenario.policy.power
    clips = f"Gradients are clipped to a norm of {spread(privacy.clip)} per device"
    if privacy.unit == "record":
        clips += f" and {spread(privacy.example_clip)} per example"
    clips = "Gradients are not clipped" if power == "noiseless" else clips
    if privacy.epsilon is None:
        return f"No privacy is promised. {clips}."
    ignored = " This policy does not keep to it." if power in ("no-dp", "noiseless") else ""
    return (
        f"(ε, δ) = ({spread(privacy.epsilon)}, {spread(privacy.delta)})-differential privacy that hides "
        f"{HIDDEN[privacy.unit, privacy.adjacency]} (adjacency: {privacy.adjacency}), by the {privacy.accountant} "
        f"accountant. {clips}.{ignored}"
    )


def sampler_words(scenario: Scenario, plan: PlanFile | None) -> str:
    """Return how chains move."""
    sampler = scenario.sampler
    kind = "Langevin dynamics" if sampler.dynamics == "overdamped" else "Kinetic (underdamped) Langevin dynamics"
    start = "a draw from the prior" if sampler.init == "prior" else "zero"
    words = (
        f"{kind}: {sampler.chains:,} chain{'s' * (sampler.chains > 1)} from {start}, {sampler.burn_in} rounds of "
        f"burn-in and {sampler.samples:,} kept."
    )
    if plan is None:
        return words
    words += f" The step size is {spread(plan.step_size)}"
    numbers = plan.constants.motion.parameters
    return words + "".join(f", the {name} {number(value)}" for name, value in numbers.items()) + "."


def policy_words(scenario: Scenario, plan: PlanFile | None) -> str:
    """Return which devices transmit, and with which power."""
    policy = scenario.policy
    words = POLICIES[policy.power].format(objective=OBJECTIVES[policy.objective])
    if policy.power in IDEAL:
        return words
    everyone = plan is not None and min(plan.active_devices) == plan.constants.devices
    words = f"{SCHEDULES['all' if everyone else policy.schedule]} {words}"
    return words + (" Channels are known one round at a time." if policy.csi == "causal" else "")


def outside_theorem(run: Run) -> str:
    """Return why the explorer would not be about a run at all; empty where it is."""
    if run.ideal:
        return "its link is ideal, so that no channel limits anything"
    kinetic = run.scenario is not None and run.scenario.sampler.dynamics == "kinetic"
    return "the bound does not hold for kinetic dynamics" if kinetic else ""


def explorer_changes(scenario: Scenario, plan: PlanFile) -> list[str]:
    """Return what the explorer, which starts at the nearest setting of Theorem 1, changes of a run."""
    link, privacy, policy, c = scenario.link, scenario.privacy, scenario.policy, plan.constants
    each = [link.snr_db, link.power, privacy.epsilon, privacy.delta, privacy.clip, privacy.example_clip]
    changes = [
        ("a static channel of the mean power instead of fading", link.fading in ("rayleigh", "rician")),
        ("a static channel of the scenario's power instead of gains from a file", link.fading == "file"),
        ("known channels and a noiseless broadcast", bool(link.csi_error) or link.downlink_snr_db < float("inf")),
        (f"one draw kept after all rounds instead of {c.samples:,}", c.samples > 1),
        (f"the paper's promise (8, 0.01) ({privacy.adjacency}), as this run has none", privacy.epsilon is None),
        ("for all devices the smallest of each value", any(isinstance(v, list) and len(set(v)) > 1 for v in each)),
        ("all devices transmit instead of some", min(plan.active_devices) < c.devices),
        ("the step size of the last round in all rounds", len(set(plan.step_size)) > 1),
        (f"optimized power instead of {policy.power}", policy.power != "optimized"),
        ("the bound minimised instead of the exact law", policy.objective == "exact"),
        (f"{MOST_DIM:,} parameters instead of {c.dim:,}", c.dim > MOST_DIM),
        (f"{MOST_DEVICES:,} devices instead of {c.devices:,}", c.devices > MOST_DEVICES),
        (f"{MOST_ROUNDS:,} rounds instead of {c.rounds:,}", c.rounds > MOST_ROUNDS),
    ]
    return [sentence for sentence, holds in changes if holds]
