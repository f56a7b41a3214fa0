"""`wflmc audit`: attacks on a scenario's plan."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from wflmc.cli.shared import AsJson, Overrides, ScenarioPath, cache_compilations, print_json, show, warn
from wflmc.errors import InputError
from wflmc.progress import ProgressBar, progress_bar


def command(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", help="Of the main attack, half with each of two data sets.")
    ] = 1_000_000,
    confidence: Annotated[
        float, typer.Option("--confidence", metavar="C", help="Of the lower bounds, all attacks together.")
    ] = 0.99,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seeds the attacks.")] = 0,
    device: Annotated[
        int | None, typer.Option("--device", metavar="K", help="Whom to attack; else the one that loses most.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option("--delta", metavar="D", help="δ to state ε at; else that of the scenario.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the scenario's plan, and hold what that proves of ε against what the plan claims.

    Exit code 1 if an attack proves more than is claimed, or if a sum in floating point changes by more. Counting alone
    cannot prove more than about 12 with a million trials, whatever leaks; the other bound takes the trade-off curve to
    be that of Gaussian noise.

    Example: wflmc audit scenario.toml --trials 100000
    """
    cache_compilations()
    document, verdict = audit_command(scenario, overrides, trials, confidence, seed, device, delta, progress_bar)
    warn(document["warnings"])
    if as_json:
        print_json(document)
    else:
        from wflmc.audit import SCOPE
        from wflmc.report import audit_table

        show(audit_table(document))
        print("".join(f"{found['text']}\n" for found in document["sums"]), end="")
        print(f"{verdict}\n{SCOPE}")
        print("Counting alone assumes nothing, and cannot prove more than about 12 with a million trials.")
    if not document["consistent"]:
        raise typer.Exit(1)


def audit_command(
    path: str,
    overrides: list[str] | None,
    trials: int,
    confidence: float,
    seed: int,
    device: int | None,
    delta: float | None,
    bar: ProgressBar,
) -> tuple[dict[str, Any], str]:
    """The audit's JSON document, and its verdict in one sentence."""
    import jax

    from wflmc import audit
    from wflmc.runs import make_plan
    from wflmc.scenario import build, load_scenario

    began = time.perf_counter()
    if not 0 <= seed < 2**32:
        raise InputError("--seed", seed, "between 0 and 2**32 - 1")
    scenario = load_scenario(path, overrides)
    inputs = build(scenario)
    made = make_plan(scenario, inputs)
    if not made.clips:
        given = scenario.policy.power
        raise InputError("policy.power", given, f"a scheme that clips: {given} does not, so nothing is promised")
    with bar("attacking", trials) as advance:
        try:
            found = audit.audit(
                jax.random.key(seed),
                made,
                inputs.posterior,
                trials=trials,
                confidence=confidence,
                delta=delta,
                device=device,
                progress=lambda done, work: advance(trials * done / work),
            )
        except InputError as error:
            if error.key in ("trials", "confidence", "device", "delta"):
                raise InputError(f"--{error.key}", error.given, error.allowed) from None
            raise
    seconds = time.perf_counter() - began
    verdict = found.verdict
    if made.ledger.any():
        spent = f"{made.epsilon_spent:.4g}" if made.epsilon_spent is not None else "more"
        with_it = f"with the release that whitened its features the promise is {spent} ({found.adjacency})"
        verdict += f" That is of its rounds alone; {with_it}."
    return {**found.as_dict(), "warnings": list(made.warnings), "seconds": seconds}, verdict
