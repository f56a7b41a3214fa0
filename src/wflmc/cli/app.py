"""The application: its commands, and how errors become exit codes and sentences.

Results go to stdout, also as JSON; warnings and progress go to stderr.
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
from typing import Annotated, NamedTuple

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

COMMANDS = (
    "new",
    "plan",
    "run",
    "advise",
    "publish",
    "fit",
    "predict",
    "tune",
    "audit",
    "reproduce",
    "sweep",
    "federate",
    "report",
    "data",
    "doctor",
)
"""Each is a module with a function `command`; the help has them in this order."""
DONE = 0
"""The exit code of a command that is done."""
BAD_INPUT = 2
"""The exit code of a command whose input is wrong."""
INTERRUPTED = 130
"""What typer returns when a command is interrupted."""
INTERRUPT_DELAY_SECONDS = 0.05
"""After which an interrupt comes again that JAX would have swallowed."""

app = typer.Typer(
    name="wflmc",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Bayesian federated learning over the air: plan it, sample with it, prove its "
        "privacy."
    ),
)


def _add_command(name: str) -> None:
    """Add the command of a module, with its docstring as help."""
    command = import_module(f"wflmc.cli.{name}").command
    paragraphs = inspect.cleandoc(command.__doc__).split("\n\n")
    # Typer would keep the line breaks of a paragraph.
    help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=help_text)(command)


for _name in COMMANDS:
    _add_command(_name)


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
    """Run the command that the arguments of the process name.

    Returns:
        The exit code that typer has for it, or what the command returned.
    """
    return typer.main.get_command(app).main(standalone_mode=False)


def exit_code(command: Callable[[], object]) -> int:
    """Run a command, print one sentence if it fails, and return the exit code.

    Errors of this package's code still end in a traceback, which is what a bug report
    needs.

    Args:
        command: returns its exit code, or anything else when it is done.

    Returns:
        0, 1, 2, or `INTERRUPTED`, which `leave` makes 1.
    """
    for stream in (sys.stdout, sys.stderr):
        # A captured stream may not know its encoding.
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    # Matplotlib reports that it builds its cache of fonts, once.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    try:
        with interrupt_handler(_interrupt):
            code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        failure = _failure(error)
        if failure is None:
            raise
        note(failure.sentence)
        return failure.code
    if code == INTERRUPTED:
        note("Interrupted; files and points that were finished are kept.")
        return INTERRUPTED
    return code if isinstance(code, int) else DONE


class _Failure(NamedTuple):
    """An exit code, and the sentence that is printed with it."""

    code: int
    sentence: str


def _failure(error: Exception) -> _Failure | None:
    """Return how an error is reported; None for a fault of this package's code."""
    match error:
        case InputError():
            return _Failure(BAD_INPUT, error.in_scenario)
        case click.UsageError():
            return _Failure(BAD_INPUT, f"{error.format_message()} Try --help.")
        case SamplingError() | OverspendError() | UnfinishedError():
            return _Failure(FAILED, str(error))
        case MemoryError():
            sentence = "Out of memory: use fewer rounds, devices, parameters or chains."
            return _Failure(FAILED, sentence)
        case OSError():
            sentence = f"{error.strerror or error}: {error.filename or 'output'}."
            return _Failure(FAILED, sentence)
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on Ctrl-C, except in two places.

    JAX's hook of the garbage collector would swallow it: it comes again a moment later.
    And modules that are interrupted while a command imports them print tracebacks, and
    nothing can be lost yet: the process ends at once.
    """
    caller = frame
    called_file = ""
    while caller is not None:
        if caller.f_code.co_name == "_xla_gc_callback":
            repeat = threading.Timer(
                INTERRUPT_DELAY_SECONDS, os.kill, (os.getpid(), number)
            )
            repeat.start()
            return
        module = caller.f_globals.get("__name__", "")
        is_importing = called_file.startswith("<frozen importlib")
        if is_importing and module.startswith("wflmc.cli"):
            exit_at_once(number, frame)
        called_file = caller.f_code.co_filename
        caller = caller.f_back
    raise KeyboardInterrupt


def leave(code: int) -> None:
    """End the process with an exit code.

    After an interrupt it ends at once, with code 1: Python's shutdown may crash while
    threads of JAX are running.

    Args:
        code: as `exit_code` returns it.
    """
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    # A last collection would go through everything that was imported, for a tenth of a
    # second and without effect.
    gc.freeze()
    sys.exit(code)
