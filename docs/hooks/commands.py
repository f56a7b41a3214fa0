"""Generate the page of commands from the commands themselves, as a hook of mkdocs."""

from __future__ import annotations

from typing import Any

import click
import typer

from wflmc.cli.app import app

PLACEHOLDER = "<!-- every command -->"
"""Replaced by the help of all commands."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the help of every command where a page has the placeholder."""
    if PLACEHOLDER not in markdown:
        return markdown
    return markdown.replace(PLACEHOLDER, every_command())


def every_command() -> str:
    """Return the help of all commands as Markdown."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    sections = [_section(name, command) for name, command in group.commands.items()]
    return "\n\n".join(sections)


def _section(name: str, command: click.Command) -> str:
    """Return usage, description, example and table of options of one command."""
    description, _, example = (command.help or "").partition("Example: ")
    lines = [f"## wflmc {name}", "", f"`{_usage(name, command)}`", ""]
    lines += [description.strip(), ""]
    if example:
        lines += ["```bash", example.strip(), "```", ""]
    lines += ["| option | meaning | default |", "|---|---|---|"]
    lines += [_row(parameter) for parameter in command.params]
    return "\n".join(lines)


def _usage(name: str, command: click.Command) -> str:
    """Return a command with its arguments, optional ones in brackets."""
    words = ["wflmc", name]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            label = _argument_label(parameter)
            words.append(label if parameter.required else f"[{label}]")
    return " ".join([*words, "[OPTIONS]"])


def _argument_label(argument: click.Parameter) -> str:
    return str(argument.metavar or argument.name).upper()


def _row(parameter: Any) -> str:
    """Return the row of an argument or option in the table."""
    if isinstance(parameter, click.Argument):
        label = _argument_label(parameter)
        default = ""
    else:
        label = _option_label(parameter)
        default = _default(parameter)
    meaning = (parameter.help or "").replace("|", "\\|")
    return f"| `{label}` | {meaning} | {default} |"


def _option_label(option: Any) -> str:
    """Return the names of an option, and the placeholder of its value."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} {option.metavar or option.type.name.upper()}"


def _default(option: Any) -> str:
    """Return the default of an option, empty where the help needs none."""
    if option.is_flag or option.default is None:
        return ""
    return f"`{option.default}`"
