"""`wflmc federate`: a scenario between a server and devices, on Flower.

Devices hold their own data, and the server the plan and the ledger.
"""

import importlib.util
import os
from typing import TYPE_CHECKING, Annotated

from wflmc.cli import shared
from wflmc.cli.shared import flag, option
from wflmc.support.errors import InputError, renamed_keys
from wflmc.support.progress import progress_bar
from wflmc.support.storage import output_folder

if TYPE_CHECKING:
    from wflmc.apps.federation.execution import Account

RUNTIMES = (
    "simulation (Flower's engine), process (all in this one), or deployment (processes "
    "here, TLS, keys)."
)
NOISES = (
    "Who adds it: channel (emulated), devices (each its share), or simulated (from the "
    "seed, protects nobody: the default unless --prepare is given)."
)
INSTALL_FLOWER = (
    "used with Flower, which is missing: pip install 'wflmc[flower]' (in a checkout: "
    "-e '.[flower]')"
)
UNCOMPARED = (
    "distance to posterior    not known: the server never sees the devices' own "
    "data, and so not their posterior"
)
ADDRESS = "With --prepare: where devices reach the server; 127.0.0.1:8000 by default."


def command(
    scenario: shared.ScenarioPath,
    out: Annotated[
        str, option("DIR", "Folder for the federation and for the files of its run.")
    ],
    overrides: shared.Overrides = None,
    runtime: Annotated[str, option("NAME", RUNTIMES)] = "simulation",
    noise: Annotated[str | None, option("NAME", NOISES)] = None,
    tolerate: Annotated[
        int, option("N", "With --noise devices: absences that a round survives.")
    ] = 0,
    chains: Annotated[
        int | None,
        option("N", "Chains at a time; the scenario's, or 1 with --prepare."),
    ] = None,
    deadline: Annotated[
        float, option("SECONDS", "A device that is later did not transmit.")
    ] = 120.0,
    ledger: Annotated[
        str | None, option("FILE", "Spend from this ledger; one of its own by default.")
    ] = None,
    prepare: Annotated[
        bool,
        flag(
            "--prepare", "Write what real machines need (keys, commands); run nothing."
        ),
    ] = False,
    own_data: Annotated[
        bool,
        flag("--own-data", "With --prepare: devices bring their own data.npz (X, y)."),
    ] = False,
    address: Annotated[str | None, option("HOST:PORT", ADDRESS)] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Run a scenario as a federation on Flower: the server holds the plan and the
    ledger, each device its own data.

    With simulated noise and the same seed the chains are those of `wflmc run`. The same
    command goes on with a federation that was stopped.

    Example: wflmc federate scenario.toml --out results
    """
    if importlib.util.find_spec("flwr") is None:
        raise InputError("--runtime", runtime, INSTALL_FLOWER)
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    from wflmc.apps.federation.execution import FederationOptions, run_federation
    from wflmc.apps.report import run_figures

    shared.cache_compilations()
    options = FederationOptions(
        scenario,
        overrides,
        runtime,
        noise,
        tolerate,
        chains,
        deadline,
        ledger,
        prepare,
        own_data,
        address,
    )
    options.check()
    option_names = {"ledger": "--ledger"} if ledger else {}
    with output_folder(out) as folder, renamed_keys(option_names):
        run_scenario, summary, evaluation, files = run_federation(
            options, folder, progress_bar, shared.note
        )
        if evaluation is not None:
            files += run_figures.draw_scores(evaluation, run_scenario, folder)
    shared.warn(summary["warnings"])
    if evaluation is None:
        lines = [
            f"Prepared in {summary['folder']}: COMMANDS.md says what to type on the "
            "server and on every device."
        ]
    else:
        # ε of the plan is not that of the ledger, and devices do not report how often
        # they clip.
        measured = [
            *evaluation.lines_of_samples,
            *_federation_lines(summary["federation"]),
        ]
        written = f"Written to {out}: {', '.join(path.name for path in files)}"
        lines = [summary["owner_only"], *measured, written]
    shared.print_result(summary, lines, as_json)


def _federation_lines(federation: "Account") -> list[str]:
    """Return lines about messages, and about ε by the ledger."""
    sent = federation["sent"]
    spent = federation["epsilon_spent"]
    counts = f"{sum(sent)} of {sum(federation['asked'])} in {len(sent)} rounds"
    lines = [f"messages                 {counts} (absences: rounds.jsonl)"]
    if federation["own_data"]:
        lines.insert(0, UNCOMPARED)
    if spent is not None:
        device = f"the worst device ({federation['adjacency']})"
        lines.append(f"ε by the ledger          {spent:.4g} for {device}")
    return lines
