"""`wflmc audit`: attacks on a scenario's plan, and what they prove of its ε."""

import time
from typing import Annotated

import typer

from wflmc.cli import shared
from wflmc.cli.shared import option
from wflmc.support.errors import InputError, renamed_keys
from wflmc.support.notices import codes
from wflmc.support.progress import progress_bar


def command(
    scenario: shared.ScenarioPath,
    overrides: shared.Overrides = None,
    trials: Annotated[
        int, option("N", "Trials of the main attack, half with each of two data sets.")
    ] = 1_000_000,
    confidence: Annotated[
        float, option("C", "Confidence of the lower bounds, over all attacks together.")
    ] = 0.99,
    seed: Annotated[int, option("S", "Seed of the attacks.")] = 0,
    device: Annotated[
        int | None, option("K", "Device to attack; by default the one that loses most.")
    ] = None,
    delta: Annotated[
        float | None, option("D", "δ at which ε is stated; the scenario's by default.")
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Attack the scenario's plan, and compare the ε that this proves with the ε that
    the plan claims.

    Exit code 1 if an attack proves more than the plan claims, or if a floating-point
    sum changes by more than it may. Counting alone cannot prove more than about 12 with
    a million trials, whatever leaks; the other bound assumes the trade-off curve of
    Gaussian noise.

    Example: wflmc audit scenario.toml --trials 100000
    """
    import jax

    from wflmc.apps import audit
    from wflmc.apps.report.text import audit_table
    from wflmc.posterior.regression import Regression
    from wflmc.runs.planning import make_plan
    from wflmc.scenario import build, load_scenario

    began = time.perf_counter()
    shared.cache_compilations()
    if not 0 <= seed < 2**32:
        raise InputError("--seed", seed, "between 0 and 2**32 - 1")
    config = load_scenario(scenario, overrides)
    inputs = build(config)
    plan = make_plan(config, inputs)
    if not plan.clips:
        power = config.policy.power
        requirement = f"a scheme that clips: {power} does not, so nothing is promised"
        raise InputError("policy.power", power, requirement)
    names = {name: f"--{name}" for name in ("trials", "confidence", "delta", "device")}
    with progress_bar("attacking", trials) as advance, renamed_keys(names):
        # There is no canary for a custom model: its plan is attacked, and `audit_pair`
        # attacks the model.
        posterior = inputs.posterior
        built_in = posterior if isinstance(posterior, Regression) else None
        result = audit.audit(
            jax.random.key(seed),
            plan,
            built_in,
            trials=trials,
            confidence=confidence,
            delta=delta,
            device=device,
            progress=lambda completed, work: advance(trials * completed / work),
        )
    document = {
        **result.as_dict(),
        "warnings": list(plan.warnings),
        "warning_codes": list(codes(plan.notices)),
        "seconds": time.perf_counter() - began,
    }
    shared.warn(document["warnings"])
    if as_json:
        shared.print_json(document)
    else:
        shared.show(audit_table(document))
        for checked_sum in document["sums"]:
            print(checked_sum["text"])
        print(result.verdict)
        if plan.ledger.any():
            epsilon = plan.epsilon_spent
            spent = "more" if epsilon is None else f"{epsilon:.4g}"
            print(
                "That is for its rounds alone; with the release that whitened its "
                f"features the promise is ε = {spent} ({result.adjacency})."
            )
        print(audit.SCOPE)
        print(
            "Counting alone assumes nothing, and cannot prove more than about 12 with "
            "a million trials."
        )
    if not document["consistent"]:
        raise typer.Exit(1)
