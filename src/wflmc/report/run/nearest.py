"""What the explorer in the page of a run leaves out of that run, in words."""

from __future__ import annotations

from wflmc.report.explorer import MOST_DEVICES, MOST_DIM, MOST_ROUNDS
from wflmc.report.parts import Html, missing, paragraph
from wflmc.runs.folder import Run
from wflmc.scenario import Scenario


def left_out(run: Run) -> str:
    """Why the explorer would not be about this run at all; empty where it is."""
    if run.ideal:
        return "its link is ideal, so that no channel limits anything"
    kinetic = run.scenario is not None and run.scenario.sampler.dynamics == "kinetic"
    return "the bound is not one for kinetic dynamics" if kinetic else ""


def starts_at(run: Run) -> Html:
    """A sentence to stand above the explorer: what takes the place of what."""
    changed = [] if run.scenario is None else _changed(run.scenario, run)
    if not changed:
        return paragraph("Theorem 1 with sliders, started at this very run.")
    return missing(
        "Not this run, but the setting of Theorem 1 that comes nearest to it, so its numbers differ from those above: "
        "{changed}.",
        changed="; ".join(changed),
    )


def _changed(scenario: Scenario, run: Run) -> list[str]:
    link, privacy, policy = scenario.link, scenario.privacy, scenario.policy
    samples = scenario.sampler.samples
    each = [link.snr_db, link.power, privacy.epsilon, privacy.delta, privacy.clip, privacy.example_clip]
    silent = run.plan is not None and min(run.plan.active_devices) < run.plan.constants.devices
    varied = run.plan is not None and len(set(run.plan.step_size)) > 1
    told = {
        "a static channel of the mean power instead of fading": link.fading in ("rayleigh", "rician"),
        "a static channel of the power in the scenario instead of gains from a file": link.fading == "file",
        "channels known and a noiseless broadcast": bool(link.csi_error) or link.downlink_snr_db < float("inf"),
        f"one sample kept after all rounds instead of {samples:,}": samples > 1,
        "the paper's promise (8, 0.01), as this run has none": privacy.epsilon is None,
        "for all devices the smallest of each value": any(isinstance(one, list) and len(set(one)) > 1 for one in each),
        "all devices send, in place of some": silent,
        "the step size of the last round in all rounds": varied,
        "power optimized instead of " + policy.power: policy.power != "optimized",
        "the bound minimised instead of the exact law": policy.objective == "exact",
        **_cut(run),
    }
    return [said for said, holds in told.items() if holds]


def _cut(run: Run) -> dict[str, bool]:
    """What is larger than the explorer computes."""
    if run.plan is None:
        return {}
    c = run.plan.constants
    most = {"parameters": (c.dim, MOST_DIM), "devices": (c.devices, MOST_DEVICES), "rounds": (c.rounds, MOST_ROUNDS)}
    return {f"{limit:,} {name} instead of {found:,}": found > limit for name, (found, limit) in most.items()}
