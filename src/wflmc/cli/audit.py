"""`wflmc audit`: attacks on a scenario's plan, and what they prove of its ε."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from wflmc.cli.shared import AsJson, Overrides, ScenarioPath, cache_compilations, print_json, show, warn
from wflmc.errors import InputError
from wflmc.progress import progress_bar


def command(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option(metavar="N", help="Trials of the main attack, half with each of two data sets.")
    ] = 1_000_000,
    confidence: Annotated[
        float, typer.Option(metavar="C", help="Confidence of the lower bounds, over all attacks together.")
    ] = 0.99,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the attacks.")] = 0,
    device: Annotated[
        int | None, typer.Option(metavar="K", help="Device to attack; by default the one that loses most.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(metavar="D", help="δ at which ε is stated; the scenario's by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the scenario's plan, and compare the ε that this proves with the ε that the plan claims.

    Exit code 1 if an attack proves more than the plan claims, or if a floating-point sum changes by more than it may.
    Counting alone cannot prove more than about 12 with a million trials, whatever leaks; the other bound assumes the
    trade-off curve of Gaussian noise.

    Example: wflmc audit scenario.toml --trials 100000
    """
    import jax

    from wflmc import audit
    from wflmc.report.text import audit_table
    from wflmc.runs import make_plan
    from wflmc.scenario import build, load_scenario

    began = time.perf_counter()
    cache_compilations()
    if not 0 <= seed < 2**32:
        raise InputError("--seed", seed, "between 0 and 2**32 - 1")
    config = load_scenario(scenario, overrides)
    inputs = build(config)
    plan = make_plan(config, inputs)
    if not plan.clips:
        given = config.policy.power
        raise InputError("policy.power", given, f"a scheme that clips: {given} does not, so nothing is promised")
    options: dict[str, Any] = {"trials": trials, "confidence": confidence, "delta": delta, "device": device}
    with progress_bar("attacking", trials) as advance:
        try:
            result = audit.audit(
                jax.random.key(seed),
                plan,
                inputs.posterior,
                **options,
                progress=lambda done, work: advance(trials * done / work),
            )
        except InputError as error:
            if error.key in options:
                raise InputError(f"--{error.key}", error.given, error.allowed) from None
            raise
    document = {**result.as_dict(), "warnings": list(plan.warnings), "seconds": time.perf_counter() - began}
    warn(document["warnings"])
    if as_json:
        print_json(document)
    else:
        show(audit_table(document))
        for found in document["sums"]:
            print(found["text"])
        print(result.verdict)
        if plan.ledger.any():
            spent = "more" if plan.epsilon_spent is None else f"{plan.epsilon_spent:.4g}"
            promise = f"ε = {spent} ({result.adjacency})"
            print(
                f"That is for its rounds alone; with the release that whitened its features the promise is {promise}."
            )
        print(audit.SCOPE)
        print("Counting alone assumes nothing, and cannot prove more than about 12 with a million trials.")
    if not document["consistent"]:
        raise typer.Exit(1)
