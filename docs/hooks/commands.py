"""Generate the page of commands from the commands themselves, as a hook of mkdocs."""

from __future__ import annotations

from typing import Any

import typer

from wflmc.cli.app import app

PLACEHOLDER = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the help of every command where a page has the placeholder."""
    return (
        markdown.replace(PLACEHOLDER, every_command())
        if PLACEHOLDER in markdown
        else markdown
    )


def every_command() -> str:
    """Return the help of all commands as Markdown."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_one(name, command) for name, command in group.commands.items())


def _one(name: str, command: Any) -> str:
    about, _, example = (command.help or "").partition("Example: ")
    words = [
        f"wflmc {name}",
        *(_usage(p) for p in command.params if p.param_type_name == "argument"),
        "[OPTIONS]",
    ]
    lines = [f"## wflmc {name}", "", f"`{' '.join(words)}`", "", about.strip(), ""]
    lines += ["```bash", example.strip(), "```", ""] if example else []
    return "\n".join(
        [
            *lines,
            "| option | meaning | default |",
            "|---|---|---|",
            *(_row(p) for p in command.params),
        ]
    )


def _usage(argument: Any) -> str:
    label = (argument.metavar or argument.name).upper()
    return label if argument.required else f"[{label}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown, default = f"`{(parameter.metavar or parameter.name).upper()}`", ""
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        value = (
            ""
            if parameter.is_flag
            else f" {parameter.metavar or parameter.type.name.upper()}"
        )
        shown = f"`{' / '.join(names)}{value}`"
        default = (
            ""
            if parameter.is_flag or parameter.default is None
            else f"`{parameter.default}`"
        )
    return f"| {shown} | {(parameter.help or '').replace('|', chr(92) + '|')} | {default} |"
