"""`wflmc plan`: the plan of a scenario, or the value of a key that reaches a target."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wflmc.cli import shared
from wflmc.cli.shared import flag, option
from wflmc.support.errors import Fault, refuse, renamed_keys
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder

if TYPE_CHECKING:
    from wflmc.apps.diagnosis.inverse import InverseQuestion, Solved
    from wflmc.scenario import Scenario

OPTIONS = {"solver": "--solver", "ledger": "--ledger"}
"""Options by the argument of the library that they become."""
SOLVE_FOR = (
    "Find the smallest link.snr_db, privacy.epsilon or sampler.burn_in that reaches "
    "--target."
)
INSTALL = "used with it: pip install 'wflmc[dp]'"
NO_ADVICE = "Do not search for changes that would help: one plan is made."
CHOSEN_BY_EXACT = (
    "It was chosen by the exact distance to the posterior (--metric exact)."
)
MAX_PLANS_FOR_BURN_IN = 330
"""Plans that a search for the number of burn-in rounds makes at most, for its bar."""
MAX_PLANS_FOR_VALUE = 150
"""Plans that a search for an SNR or ε makes at most, for its bar."""


def command(
    scenario: shared.ScenarioPath,
    overrides: shared.Overrides = None,
    as_json: shared.AsJson = False,
    out: Annotated[
        str | None, option("DIR", "Folder for plan.npz, plan.json and scenario.toml.")
    ] = None,
    plot: Annotated[
        str | None, option("FILE", "Draw the plan into this file (.png, .svg, .pdf).")
    ] = None,
    solver: Annotated[
        str, option(None, "own, or cvxpy as an independent reference.")
    ] = "own",
    unknown: Annotated[str | None, option("KEY", SOLVE_FOR, "--solve-for")] = None,
    target: Annotated[float | None, option(None, "W2² to reach after burn-in.")] = None,
    metric: Annotated[
        str, option(None, "What must reach the target: bound, or exact (the true W2²).")
    ] = "bound",
    ledger: Annotated[
        str | None,
        option("FILE", "Plan with the budget that this ledger of a run leaves."),
    ] = None,
    compare: Annotated[
        bool | None,
        option(None, "Ask dp-accounting for ε too; by default with --json."),
    ] = None,
    no_advice: Annotated[bool, flag("--no-advice", NO_ADVICE)] = False,
) -> None:
    """Plan which devices transmit in every round and with which power, and bound the
    distance to the posterior.

    Exit code 1 if no value of the --solve-for key reaches the target.

    The diagnosis names what keeps samples from the posterior and which setting would
    help; to find out, plans with one setting changed are made.

    Other packages can add policies, fading laws and models, which a scenario names like
    the built-in ones: see docs/guides/extending.md.

    Example: wflmc plan scenario.toml --set link.snr_db=10
    """
    began = time.perf_counter()
    from wflmc.apps.diagnosis.advice import PlanSource, diagnose_plan
    from wflmc.apps.diagnosis.inverse import InverseQuestion
    from wflmc.apps.report import text
    from wflmc.runs import documents, folder, planning
    from wflmc.scenario import NotCovered, build, load_scenario

    _check_options(
        unknown=unknown, target=target, metric=metric, ledger=ledger, compare=compare
    )
    if plot is not None:
        from wflmc.apps.report import run_figures

        run_figures.check_picture(plot)
    config = load_scenario(scenario, overrides)
    answer = None
    if unknown is not None and target is not None:
        question = InverseQuestion(
            key=unknown, target=target, metric=metric, solver=solver
        )
        solved = _solve(config, question)
        config = solved.scenario
        answer = solved.answer.document
    if out is not None:
        planning.refuse_own_scenario(Path(scenario), Path(out), config)
        folder.refuse_run(Path(out).expanduser())
    inputs = build(config)
    spent = planning.spent_before(ledger, inputs, must_exist=True)
    with renamed_keys(OPTIONS):
        plan = planning.make_plan(config, inputs, solver=solver, ledger=spent)
    causes = None if no_advice else diagnose_plan(PlanSource(config, inputs), plan)
    document = documents.plan_document(
        config,
        inputs,
        plan,
        time.perf_counter() - began,
        compare=as_json if compare is None else compare,
    )
    document["diagnosis"] = causes
    if answer is not None:
        sentence = text.answer_sentence(answer, plan.privacy.adjacency)
        document["solve_for"] = {**answer, "answer": sentence}
        if metric == "exact" and document["not_covered"]:
            item = NotCovered(f"--solve-for {unknown}", CHOSEN_BY_EXACT)
            document["not_covered"].append(vars(item))
    files: list[Path] = []
    if out is not None:
        with output_folder(out) as plan_folder:
            files = folder.write_plan(
                plan_folder, scenario=config, plan=plan, plan_document=document
            )
    if plot is not None:
        run_figures.draw_plan(plan, plot)
    if as_json:
        shared.warn(document["warnings"])
        shared.print_json(document)
    else:
        shared.show(text.plan_table(document))
        _print_files(files, plot, out)
    if answer is not None and not answer["reachable"]:
        if as_json:
            shared.note(document["solve_for"]["answer"])
        raise typer.Exit(1)


def _check_options(
    *,
    unknown: str | None,
    target: float | None,
    metric: str,
    ledger: str | None,
    compare: bool | None,
) -> None:
    """Refuse options that contradict each other, or need a package that is missing."""
    solves = unknown is not None
    without_solving = "left out without --solve-for KEY"
    no_accountant = compare and not find_spec("dp_accounting")
    spends = ledger is not None
    refuse(
        (solves and target is None, "--target", None, "given with --solve-for"),
        (target is not None and not solves, "--target", target, without_solving),
        (metric != "bound" and not solves, "--metric", metric, without_solving),
        (spends and solves, "--ledger", ledger, "left out with --solve-for"),
        (no_accountant, "--compare", Fault("finds no dp-accounting"), INSTALL),
    )


def _solve(scenario: "Scenario", question: "InverseQuestion") -> "Solved":
    """Return the answer to an inverse question, with a progress bar."""
    from wflmc.apps.diagnosis.inverse import solve_for

    max_plans = MAX_PLANS_FOR_VALUE
    if question.key == "sampler.burn_in":
        max_plans = MAX_PLANS_FOR_BURN_IN
    with (
        progress_bar("plans tried, at most", max_plans) as advance,
        renamed_keys(OPTIONS),
    ):
        return solve_for(scenario, question, advance)


def _print_files(files: list[Path], plot: str | None, out: str | None) -> None:
    """Print which files were written."""
    if plot is not None:
        print(f"Picture: {plot}")
    if files:
        names = ", ".join(path.name for path in files)
        print(f"Written to {out}: {names}; `wflmc run --plan {out}` runs this plan.")
