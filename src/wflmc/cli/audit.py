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
    """Attack the scenario's plan, and compare the ε that this proves with the ε that the plan claims.

    Exit code 1 if an attack proves more than the plan claims, or if a floating-point sum changes by more than it may.
    Counting alone cannot prove more than about 12 with a million trials, whatever leaks; the other bound assumes the
    trade-off curve of Gaussian noise.

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
        given = config.policy.power
        raise InputError(
            "policy.power",
            given,
            f"a scheme that clips: {given} does not, so nothing is promised",
        )
    names = {name: f"--{name}" for name in ("trials", "confidence", "delta", "device")}
    with progress_bar("attacking", trials) as advance, renamed_keys(names):
        # Of a model of one's own no canary is known: the plan is attacked, and `audit_pair` attacks the model.
        known = inputs.posterior if isinstance(inputs.posterior, Regression) else None
        result = audit.audit(
            jax.random.key(seed),
            plan,
            known,
            trials=trials,
            confidence=confidence,
            delta=delta,
            device=device,
            progress=lambda done, work: advance(trials * done / work),
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
        print(
            "\n".join([*(found["text"] for found in document["sums"]), result.verdict])
        )
        if plan.ledger.any():
            spent = (
                "more" if plan.epsilon_spent is None else f"{plan.epsilon_spent:.4g}"
            )
            whole = f"the promise is ε = {spent} ({result.adjacency})"
            print(
                f"That is for its rounds alone; with the release that whitened its features {whole}."
            )
        print(audit.SCOPE)
        print(
            "Counting alone assumes nothing, and cannot prove more than about 12 with a million trials."
        )
    if not document["consistent"]:
        raise typer.Exit(1)
