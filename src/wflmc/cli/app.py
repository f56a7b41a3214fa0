"""`wflmc new | plan | run | publish | audit | reproduce | sweep | federate | report | data | doctor`.

Results go to stdout, also as JSON; warnings and progress to stderr.
"""

from __future__ import annotations

import click
import typer

from wflmc.cli import looking, several, single
from wflmc.cli.publish import publish
from wflmc.cli.shell import app

for _command in (
    *(single.new, single.plan, single.run, publish, single.audit),
    *(several.reproduce, several.sweep, several.federate),
    *(looking.report, looking.data, looking.doctor),
):
    app.command()(_command)


def command() -> object:
    """Run the command that the arguments name; its exit code."""
    found = typer.main.get_command(app)
    assert isinstance(found, click.Group)
    for parameter in (each for one in found.commands.values() for each in one.params):
        if isinstance(parameter, click.Option):  # else typer's messages name a variable that there is not
            parameter.show_envvar = parameter.envvar is not None
    return found.main(standalone_mode=False)
