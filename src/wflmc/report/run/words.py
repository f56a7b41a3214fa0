"""A scenario in sentences: who holds what, over which channel, with which promise, sampled how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy import HIDDEN
from wflmc.report.parts import Html, fold, join, missing, number, paragraph, table
from wflmc.runs.folder import Run
from wflmc.scenario import Scenario

PARTITIONS = {
    "iid": "shared out at random",
    "blocks": "shared out in the order of the file",
    "by-label": "sorted by outcome, so that no two devices hold alike data",
}
POLICIES = {
    "optimized": "Powers are chosen round by round to minimise the bound, within power limits and privacy budgets.",
    "equal": "Every round spends the same share of the privacy budget.",
    "no-dp": "Powers ignore the privacy budget: only power limits count.",
    "noiseless-dp": "The link is ideal, and the only noise is what privacy and sampling ask for.",
    "noiseless": "The link is ideal and nothing is clipped: plain Langevin sampling, for comparison, with no privacy.",
}
SCHEDULES = {
    "threshold": "In each round the devices whose channel is above a threshold send, the others stay silent.",
    "all": "All devices send in every round.",
    "unbiased": "In each round equally many devices send, each device as often as any other.",
}
OBJECTIVES = {
    "worst": "the bound of the worst kept round",
    "average": "the average of the bound over the kept rounds",
    "exact": "the true distance W2² of the worst kept round",
}


def scenario_section(run: Run) -> Html:
    """The scenario in words, with the file folded below."""
    if run.scenario is None:
        return missing("Neither scenario.toml nor plan.json is in the folder, so the scenario is not known.")
    rows = [
        ("Devices and data", data_words(run.scenario, run)),
        ("Model", model_words(run.scenario, run)),
        ("Channel", channel_words(run.scenario)),
        ("Promise", promise_words(run.scenario)),
        ("Sampler", sampler_words(run.scenario, run)),
        ("Who sends", policy_words(run.scenario, run)),
    ]
    if run.scenario_text is None:
        return join([table(rows), missing("scenario.toml is missing; this is what plan.json says.")])
    shown = join([Html("<pre>"), run.scenario_text, Html("</pre>")])
    again = paragraph("Saved as <code>scenario.toml</code>, <code>wflmc run scenario.toml --out DIR</code> repeats it.")
    if run.scenario.sampler.seed == "secret":
        again = paragraph("The noise of this run was secret: another run of this scenario differs, and costs again.")
    return join([table(rows), fold("The scenario file, to copy", join([again, shown]))])


def spread(values: float | Sequence[float] | None, unit: str = "") -> str:
    """One number, or the smallest and the largest of several."""
    if values is None:
        return "–"
    ends = [values, values] if isinstance(values, float | int) else [min(values), max(values)]
    low, high = (number(float(end), 4) for end in ends)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def data_words(scenario: Scenario, run: Run) -> str:
    """Who holds which data."""
    section = scenario.posterior
    names = {"synthetic": "made-up examples", "mnist": "images of MNIST"}
    what = names.get(section.data, f"examples of {PurePath(section.data).name}")
    count = int(run.rebuilt.inputs.posterior.sizes.sum()) if run.rebuilt is not None else section.examples
    known = run.rebuilt is not None or section.data in names
    how = PARTITIONS.get(section.partition, "")
    if section.partition.startswith("dirichlet:"):
        how = f"shared out unevenly (Dirichlet, A = {section.partition.partition(':')[2]})"
    sizes = ""
    if run.rebuilt is not None:
        held = run.rebuilt.inputs.posterior.sizes
        low, high = int(held.min()), int(held.max())
        sizes = f", {low:,} each" if low == high else f", {low:,} to {high:,} each"
    number_of = f"{count:,} " if known else "the "
    return f"{section.devices:,} devices hold {number_of}{what}{sizes}, {how or section.partition}."


def model_words(scenario: Scenario, run: Run) -> str:
    """What is sampled."""
    section = scenario.posterior
    kind = "Linear regression with unit noise"
    if section.model == "softmax":
        kind = f"Multinomial logistic (softmax) regression{_classes(run)}"
    size = "" if run.plan is None else f", {run.plan.constants.dim:,} parameters"
    constant = ", an intercept among them" if section.intercept else ""
    words = f"{kind}{size}{constant}, with a prior of standard deviation {number(section.prior_std)} on each."
    whitening = {
        "whiten": " Chains move in whitened coordinates, by statistics of the features that are taken as public.",
        "private-whiten": " Chains move in whitened coordinates, by statistics released from the same privacy budget.",
    }
    if run.plan is not None:
        ends = run.plan.constants
        words += f" The posterior's curvature lies between μ = {number(ends.mu)} and L = {number(ends.L)}."
    return words + whitening.get(section.preconditioner, "")


def _classes(run: Run) -> str:
    """How many classes there are, and their names where these are not 0, 1, 2, …."""
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    if not isinstance(posterior, SoftmaxPosterior):
        return ""
    names, few = [str(name) for name in posterior.class_names], 10
    if posterior.class_names == tuple(range(posterior.classes)):
        return f" into {posterior.classes} classes"
    return f" into {posterior.classes} classes ({', '.join(names[:few])}{', …' * (len(names) > few)})"


def channel_words(scenario: Scenario) -> str:
    """The link between devices and server."""
    link = scenario.link
    if scenario.policy.power in ("noiseless", "noiseless-dp"):
        return "An ideal link: devices are heard without noise."
    mean = f"mean power gain E|h|² = {spread(link.power)}"
    kinds = {
        "static": f"Channels that do not change, with power gain |h|² = {spread(link.power)}",
        "rayleigh": f"Rayleigh fading, {mean}",
        "rician": f"Rician fading (constant over scattered power {number(link.rician_k)}), {mean}",
        "file": f"Channel gains from {PurePath(link.gains).name}",
    }
    words = f"{kinds[link.fading]}, at an SNR of {spread(link.snr_db)} dB (transmit power per parameter over noise)."
    if link.correlation and link.fading in ("rayleigh", "rician"):
        words += f" Successive rounds are correlated by {number(link.correlation)}."
    if link.csi_error:
        words += f" Devices know their channels up to an error of {number(link.csi_error)}, of which the worst is paid."
    if link.downlink_snr_db < float("inf"):
        words += f" The server's broadcast is noisy, {number(link.downlink_snr_db)} dB."
    return words + " Those that send do so at once, and the server hears the sum of their gradients in noise."


def promise_words(scenario: Scenario) -> str:
    """What devices are promised, and for what price."""
    privacy = scenario.privacy
    clips = f"Gradients are clipped to a norm of {spread(privacy.clip)} per device"
    if scenario.policy.power == "noiseless":
        clips = "Gradients are not clipped"
    if privacy.unit == "record":
        clips += f" and {spread(privacy.example_clip)} per example"
    if privacy.epsilon is None:
        return f"No privacy is promised. {clips}."
    how = "exact" if privacy.accountant == "exact" else "paper's"
    promise = f"(ε, δ) = ({spread(privacy.epsilon)}, {spread(privacy.delta)})"
    hides = f"{HIDDEN[privacy.unit, privacy.adjacency]} (adjacency: {privacy.adjacency})"
    ignored = " This policy does not keep to it." if scenario.policy.power in ("no-dp", "noiseless") else ""
    return f"{promise}-differential privacy that hides {hides}, by the {how} accountant. {clips}.{ignored}"


def sampler_words(scenario: Scenario, run: Run) -> str:
    """The chain."""
    sampler = scenario.sampler
    kind = "Langevin dynamics" if sampler.dynamics == "overdamped" else "Kinetic (underdamped) Langevin dynamics"
    count = f"{sampler.chains:,} chain{'s' * (sampler.chains > 1)}"
    start = "a draw from the prior" if sampler.init == "prior" else "zero"
    early = sampler.burn_in if isinstance(sampler.burn_in, str) else f"{sampler.burn_in:,}"
    words = f"{kind}: {count} from {start}, {early} rounds of burn-in and {sampler.samples:,} kept."
    if run.plan is None:
        return words
    sizes, constants = run.plan.step_size, run.plan.constants
    words += f" The step size is {spread(sizes)}{'' if min(sizes) == max(sizes) else ', changing with the round'}"
    words += f" ({constants.step_size * (constants.mu + constants.L):.3g}/(μ+L) at the end)" * (not constants.friction)
    return words + (f", the friction {number(constants.friction)}." if constants.friction else ".")


def policy_words(scenario: Scenario, run: Run) -> str:
    """Who sends, and how strongly."""
    policy = scenario.policy
    words = POLICIES[policy.power]
    if policy.power == "equal" and scenario.privacy.epsilon is None:
        words = "Every round has the same power, as far as channels allow."
    if policy.power in ("noiseless", "noiseless-dp"):
        return words
    if policy.power == "optimized" and policy.objective != "worst":
        words = words.replace("the bound", OBJECTIVES[policy.objective], 1)
    plan = run.plan
    everyone = plan is not None and min(plan.active_devices) == plan.constants.devices
    words = f"{SCHEDULES['all' if everyone else policy.schedule]} {words}"
    return words + (" Channels are known one round at a time." if policy.csi == "causal" else "")
