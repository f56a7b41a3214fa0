"""`wflmc new | plan | run | audit | reproduce | sweep | federate | report | data | doctor`.

Results go to stdout, also as JSON; warnings and progress to stderr.
"""

from __future__ import annotations

import typer

from wflmc.cli import guard, looking, several, single
from wflmc.cli.shell import app

for _command in (
    *(single.new, single.plan, single.run, single.audit),
    *(several.reproduce, several.sweep, several.federate),
    *(looking.report, looking.data, looking.doctor),
):
    app.command()(_command)


def main() -> None:
    """Run the command line: exit code 0 when done, 2 for bad input, 1 for anything else."""
    guard.leave(guard.guarded(lambda: typer.main.get_command(app).main(standalone_mode=False)))
