"""The application: its commands, and how whatever happens in one becomes an exit code and one sentence. Results go to
stdout, also as JSON; warnings and progress go to stderr.
"""

import gc
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Annotated

import click
import typer

from wflmc.cli import FAILED, exit_at_once, interrupt_handler
from wflmc.cli.shared import flag, note
from wflmc.support.errors import (
    InputError,
    OverspendError,
    SamplingError,
    UnfinishedError,
)
from wflmc.version import __version__

COMMANDS = "new plan run advise publish fit predict tune audit reproduce sweep federate report data doctor"
"""Each is a module with a function `command`; the help has them in this order."""
DONE, BAD_INPUT = 0, 2
INTERRUPTED = 130
"""What typer returns when a command is interrupted."""

app = typer.Typer(
    name="wflmc",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bayesian federated learning over the air: plan it, sample with it, prove its privacy.",
)
for _name in COMMANDS.split():
    _command = import_module(f"wflmc.cli.{_name}").command
    _paragraphs = inspect.cleandoc(_command.__doc__).split("\n\n")
    _help = "\n\n".join(
        " ".join(paragraph.split()) for paragraph in _paragraphs
    )  # typer would keep line breaks
    app.command(_name, help=_help)(_command)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, flag("--version", "Show the version.")] = False,
) -> None:
    if version:
        print(f"wflmc {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_app() -> object:
    """Run the command that the arguments name; return its exit code."""
    return typer.main.get_command(app).main(standalone_mode=False)


def exit_code(command: Callable[[], object]) -> int:
    """Run a command, say in one sentence what went wrong, and return the exit code.

    Errors of our own still end in a traceback, which is what a bug report needs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            AttributeError, ValueError
        ):  # a captured stream may not know its encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    logging.getLogger("matplotlib.font_manager").setLevel(
        logging.ERROR
    )  # of a font cache that it builds once
    try:
        with interrupt_handler(_interrupt):
            code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nothing is left to flush at exit
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except InputError as error:
        return _failed(BAD_INPUT, error.in_scenario)
    except click.UsageError as error:
        return _failed(BAD_INPUT, f"{error.format_message()} Try --help.")
    except (SamplingError, OverspendError, UnfinishedError) as error:
        return _failed(FAILED, str(error))
    except MemoryError:
        return _failed(
            FAILED, "Out of memory: use fewer rounds, devices, parameters or chains."
        )
    except OSError as error:
        return _failed(
            FAILED, f"{error.strerror or error}: {error.filename or 'output'}."
        )
    if code == INTERRUPTED:
        return _failed(
            INTERRUPTED, "Interrupted; files and points that were finished are kept."
        )
    return code if isinstance(code, int) else DONE


def _failed(code: int, sentence: str) -> int:
    note(sentence)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on Ctrl-C, but for two places.

    JAX's hook of the garbage collector would swallow it: it comes again a moment later. And modules that are
    interrupted while a command imports them print tracebacks, and nothing can be lost yet: the process ends at once.
    """
    at, inner = frame, ""
    while at is not None:
        if at.f_code.co_name == "_xla_gc_callback":
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return
        if inner.startswith("<frozen importlib") and at.f_globals.get(
            "__name__", ""
        ).startswith("wflmc.cli"):
            exit_at_once(number, frame)
        inner, at = at.f_code.co_filename, at.f_back
    raise KeyboardInterrupt


def leave(code: int) -> None:
    """End the process; after an interrupt at once, because tearing down under running threads of JAX may crash."""
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    gc.freeze()  # or a last collection would look at all that was imported, for a tenth of a second and nothing
    sys.exit(code)
