"""The ledger of every device's losses, round by round, written before a round is sent.

A ledger file has one JSON object a line and only ever grows. The first line says whose
data it is about and what they were promised; every further one is a round. Each line
carries a hash of itself and of the line before, so that an edited file is noticed. A
line that a crash cut short was never acted upon, and is dropped.

Beside `people.jsonl`, `people.jsonl.head` is its anchor: how many lines it has, the
hash of the last, and a secret. Lines are on the disk before the anchor counts them, so
that after a crash it may count too few, never too many: a ledger with fewer lines has
been shortened. Names of data, runs and noise are written as HMACs with the secret,
which only the owner of the anchor can compute: whoever knows all but one label could
otherwise test guesses of it against a bare hash of the data.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from wflmc.privacy.accountants import Array
from wflmc.privacy.promise import Privacy
from wflmc.support.errors import InputError, OverspendError
from wflmc.support.storage import append_text, exclusive, replacing

LedgerLine: TypeAlias = dict[str, Any]
"""A line of the file, without its hash: JSON of whatever types."""

TOLERANCE = 1e-9
"""Relative rounding that plans and ledgers forgive each other."""
VERSION = 2
"""Of the file; ledgers of version 1 had no anchor, so that missing lines were not
noticed."""
HEADER_BEGINNING = b'{"ledger": 2, '
"""The first characters of a ledger's first line, which a crash may have cut short."""
SALT_BYTES = 32
"""Of the secret of an anchor."""
NAME_DIGITS = 32
"""Hexadecimal digits of the HMACs that stand for names."""
SHOWN_DIGITS = 12
"""Hexadecimal digits of a hash that an error shows."""


class ForeignLedgerError(InputError):
    """A ledger about other data, or of another promise."""


class Anchor(NamedTuple):
    """The length of a ledger when it was last written, and the secret of its names."""

    lines: int
    """How many lines the ledger had."""
    last_hash: str
    """The hash of the last of them; empty where there is none."""
    salt: bytes
    """The secret."""

    @classmethod
    def of(cls, ledger: Path) -> Self | None:
        """Read the anchor beside a ledger.

        Args:
            ledger: the ledger's file.

        Returns:
            The anchor; None where there is none, or none that may be read.

        Raises:
            InputError: if the file is not an anchor.
        """
        path = anchor_path(ledger)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            lines = content["lines"]
            if not isinstance(lines, int) or lines < 0:
                raise ValueError
            return cls(lines, str(content["chain"]), bytes.fromhex(content["salt"]))
        except (FileNotFoundError, PermissionError):
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError("ledger", str(path), "as wflmc wrote it") from None

    def save(self, ledger: Path) -> None:
        """Write the anchor whole or not at all, readable by its owner alone.

        Args:
            ledger: the ledger's file, beside which the anchor is put.

        Raises:
            OSError: if it cannot be written; the previous anchor is then unchanged.
        """
        content = {
            "lines": self.lines,
            "chain": self.last_hash,
            "salt": self.salt.hex(),
        }
        with replacing(anchor_path(ledger), mode=0o600) as file:
            file.write(json.dumps(content).encode())

    def name(self, text: str) -> str:
        """Return what stands for a name in the file.

        Args:
            text: the name of data, a run or noise; may be empty.

        Returns:
            The first 32 hexadecimal digits of its HMAC-SHA256 with the secret; empty
            for an empty name.
        """
        if not text:
            return ""
        code = hmac.new(self.salt, text.encode(), hashlib.sha256)
        return code.hexdigest()[:NAME_DIGITS]


def anchor_path(ledger: str | Path) -> Path:
    """Return the file that anchors a ledger, whether it exists or not.

    Args:
        ledger: the ledger's file, such as `people.jsonl`.

    Returns:
        The file beside it, such as `people.jsonl.head`.
    """
    return Path(f"{ledger}.head")


def move_ledger(path: Path, target: Path) -> None:
    """Give a ledger another name, and its anchor with it.

    An existing target is replaced. A ledger without an anchor is moved alone.

    Args:
        path: the ledger's file.
        target: its new name, in the same file system.
    """
    os.replace(path, target)
    if anchor_path(path).exists():
        os.replace(anchor_path(path), anchor_path(target))


def noise_of_another_run(path: Path, run: str, noise: str) -> bool:
    """Return whether a ledger has a round of another run with the same noise.

    Whoever sees two runs with equal noise can take it away. The ledger may be of any
    promise; its hashes are not verified, and lines that are not JSON are skipped.

    Args:
        path: the ledger's file.
        run: the name of the run that is about to be made.
        noise: the name of its noise, not empty.

    Returns:
        Whether there is such a round; False for a ledger that is empty.

    Raises:
        InputError: if it has lines but no anchor, so that names cannot be compared.
    """
    anchor = Anchor.of(path)
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, RecursionError):  # no line of a ledger
            lines.append(dict(json.loads(text)))
    if anchor is None:
        if lines:
            raise _without_anchor(path, len(lines))
        return False
    run_code = anchor.name(run)
    noise_code = anchor.name(noise)
    return any(
        line.get("noise") == noise_code and line.get("run") != run_code
        for line in lines
    )


def _damaged(path: Path, finding: str, remedy: str) -> InputError:
    return InputError(
        "ledger",
        f"{path} with {finding}",
        f"{remedy}, or delete both to begin a new ledger, which does not know what has "
        "been spent so far",
    )


def _shortened(path: Path, lines: int, anchored_lines: int) -> InputError:
    plural = "" if lines == 1 else "s"
    return _damaged(
        path,
        f"{lines} line{plural}",
        f"as long as it was: its anchor {anchor_path(path).name} counts "
        f"{anchored_lines}. Restore the longer copy",
    )


def _without_anchor(path: Path, lines: int) -> InputError:
    return _damaged(
        path,
        f"{lines} lines",
        f"beside its anchor {anchor_path(path).name}, which is missing or not yours to "
        "read: restore it",
    )


class Ledger:
    """Losses of every device, and the budgets that no round may exceed.

    The promise of `privacy` holds for everything that is charged before it is sent, as
    long as all releases about the same data are charged to one ledger. Losses of
    several runs simply add up; the ledger knows no other composition.

    Args:
        privacy: what devices are promised; gives the budgets.
        devices: K.
        subject: whose data the losses are about, such as `posterior.digest`; a file
            about others is refused. The file has an HMAC of it, with a secret that is
            stored in the anchor beside the file. Empty to accept any.
        enforced: whether a round that would exceed a budget is refused; a policy that
            ignores privacy is written down all the same.
        path: the file, which is begun where there is none and continued where there is
            one; None for a ledger in memory.
        read_only: verify a file and leave it as it is, with or without its anchor;
            charges stay in memory.

    Raises:
        InputError: if the file is not a ledger, or has been changed or shortened, or
            its anchor is missing and more is to be written.
        ForeignLedgerError: if it is about other data or another promise.

    Examples:
        >>> ledger = Ledger(Privacy(epsilon=8, delta=0.01), devices=2)
        >>> ledger.charge("a", 0, [[1.0, 0.0], [1.5, 0.0]])

        The same round of the same run again sends nothing new, and costs nothing:

        >>> ledger.charge("a", 1, [[1.5, 0.0]])
        >>> ledger.spent.tolist()
        [2.5, 0.0]
        >>> ledger.charge("a", 2, [[0.6, 0.1]])
        Traceback (most recent call last):
        wflmc.support.errors.OverspendError: Round 3 would bring device 0 to a ...
    """

    def __init__(
        self,
        privacy: Privacy,
        devices: int,
        *,
        subject: str = "",
        enforced: bool = True,
        path: str | Path | None = None,
        read_only: bool = False,
    ) -> None:
        self.privacy = privacy
        self.devices = devices
        self.subject = subject
        self.path = None if path is None else Path(path)
        self.budget = privacy.budget(devices) if enforced else np.full(devices, np.inf)
        """The largest loss of each device, [K]."""
        self.spent = np.zeros(devices)
        """The loss of each device so far, [K]."""
        self.entries: dict[tuple[str, int], Array] = {}
        """Losses [K] by the name of the run, as the file has it, and the round."""
        self.line_hashes: list[str] = []
        """The hash of every line, each of which stands for all lines up to it."""
        self._runs_by_noise: dict[tuple[str, int], str] = {}
        """The run that had a noise in a round, all by name."""
        self._anchor = Anchor(0, "", secrets.token_bytes(SALT_BYTES))
        self._is_anchored = True
        """Whether the anchor is that of the file; False where the file has none, or
        none that may be read, so that its names cannot be compared."""
        self._subject_name = ""
        """The subject as the file has it."""
        self._bytes_read = 0
        """Length of the file's complete lines that were read or written so far."""
        if self.path is None:
            self._append([self._header])
        elif read_only:
            self._read(self.path)
            self.path = None
        else:
            with self._locked():
                pass

    @property
    def _header(self) -> LedgerLine:
        header = {"ledger": VERSION, "subject": self.name(self.subject)}
        return header | self._promise

    @property
    def _promise(self) -> LedgerLine:
        privacy = self.privacy
        return {
            "devices": self.devices,
            "unit": privacy.unit,
            "accountant": privacy.accountant,
            "adjacency": privacy.adjacency,
            "epsilon": _shortest(privacy.epsilon, self.devices),
            "delta": _shortest(privacy.delta, self.devices),
        }

    def name(self, text: str) -> str:
        """Return the name of data, a run or noise as this ledger writes it.

        Args:
            text: the name; may be empty.

        Returns:
            An HMAC with the ledger's secret, so that two ledgers name the same run
            differently; empty for an empty name.
        """
        return self._anchor.name(text)

    def is_about(self, subject: str) -> bool:
        """Return whether the ledger may be about some data.

        Args:
            subject: the name of the data, such as `posterior.digest`.

        Returns:
            False only where the ledger names other data. A ledger that names none, or
            whose anchor cannot be read, may be about any.
        """
        if not self._is_anchored:
            return True
        return self._subject_name in ("", self.name(subject))

    @property
    def last_hash(self) -> str:
        """The hash of the last line, which stands for the whole ledger.

        It is empty where there is no line. A run notes it, so that a ledger that
        lacks the run's rounds can be recognized later.
        """
        return self.line_hashes[-1] if self.line_hashes else ""

    def check(self, first: int, losses: ArrayLike) -> None:
        """Refuse successive rounds if one of them would overspend a device.

        Nothing is written. Losses may exceed a budget by a relative rounding of 1e-9.

        Args:
            first: the number of the first round, which the error names, from 0.
            losses: of every round and device, [round, K], at least 0.

        Raises:
            OverspendError: names the first round and the device that has overspent
                most in it.
            InputError: if there is not one loss of at least 0 for every device.
        """
        losses = np.asarray(losses, dtype=float)
        has_shape = losses.ndim == 2 and losses.shape[1] == self.devices
        if not has_shape or not np.all(losses >= 0):
            raise InputError(
                "losses",
                f"shape {losses.shape}",
                f"losses of at least 0 for {self.devices} devices",
            )
        refuse_overspending(self.budget, self.spent + np.cumsum(losses, axis=0), first)

    def charge(self, run: str, first: int, losses: ArrayLike, noise: str = "") -> None:
        """Write down rounds of a run before they are sent, or refuse them all.

        A round that the same run has been charged for already costs nothing again: sent
        with the same noise, it tells the server nothing new. Lines are on the disk when
        the call returns; between two calls other processes may write to the file.

        Args:
            run: what is sent: a digest of the plan, the data and the seed.
            first: the number of the first round, from 0.
            losses: of every round and device, [round, K], at least 0.
            noise: a name for the noise of the run; empty where noise cannot repeat.
                Another run with the same noise in the same round is refused: whoever
                sees both could take the noise away.

        Raises:
            OverspendError: if a round would exceed a budget; nothing is charged.
            InputError: if the noise is another run's, a round of the same run was
                charged at another loss, a loss is negative or missing, or the file is
                not what this ledger has written.
        """
        with self._locked():
            run_name = self.name(run)
            noise_name = self.name(noise)
            lines: list[LedgerLine] = []
            rows = np.array(losses, dtype=float)
            for index, loss in enumerate(rows):
                round_number = first + index
                if self._is_charged(run_name, round_number, loss):
                    rows[index] = 0.0  # it costs nothing again
                    continue
                self._refuse_shared_noise(run_name, round_number, noise_name)
                line = {
                    "run": run_name,
                    "noise": noise_name,
                    "round": round_number,
                    "loss": loss.tolist(),
                }
                lines.append(line)
            if lines:
                self.check(first, rows)
                self._append(lines)

    def _is_charged(self, run_name: str, round_number: int, loss: Array) -> bool:
        """Return whether a round was charged; refuse one that was, at another loss."""
        charged = self.entries.get((run_name, round_number))
        if charged is None:
            return False
        if not np.allclose(charged, loss, rtol=TOLERANCE, atol=0):
            raise InputError(
                "ledger",
                f"another loss for round {round_number + 1}",
                "the one of the same run",
            )
        return True

    def _refuse_shared_noise(
        self, run_name: str, round_number: int, noise_name: str
    ) -> None:
        if not noise_name:
            return
        owner = self._runs_by_noise.get((noise_name, round_number), run_name)
        if owner != run_name:
            raise InputError(
                "seed",
                "the noise that another run of this ledger had in round "
                f"{round_number + 1}",
                "another one: who sees two rounds with the same noise can take it away",
            )

    def rounds(self, run: str) -> int:
        """Return how many rounds of a run have been charged.

        Args:
            run: the run, as it was given to `charge`.

        Returns:
            The number of its rounds; 0 for a run that the ledger does not have.
        """
        name = self.name(run)
        return sum(run_name == name for run_name, _ in self.entries)

    def paid(self, run: str, number: int) -> Array | None:
        """Return what a round of a run was charged.

        Args:
            run: the run, as it was given to `charge`.
            number: of the round, from 0.

        Returns:
            The losses [K]; None where the round was not charged.
        """
        return self.entries.get((self.name(run), number))

    def _append(self, lines: list[LedgerLine]) -> None:
        """Write lines to the file, if there is one, and add them to the losses."""
        if self.path is not None:
            self._write(self.path, lines)
        for line in lines:
            self._add(line)

    def _write(self, path: Path, lines: list[LedgerLine]) -> None:
        """Write lines to the file, then their anchor; take them back if that fails."""
        text = ""
        last_hash = self.last_hash
        for line in lines:
            last_hash = _next_hash(last_hash, line)
            text += json.dumps({**line, "chain": last_hash}) + "\n"
        length = len(self.line_hashes) + len(lines)
        anchor = self._anchor._replace(lines=length, last_hash=last_hash)
        try:
            append_text(path, text)
            anchor.save(path)
        except OSError:
            os.truncate(path, self._bytes_read)  # nothing of it will be sent
            raise
        self._anchor = anchor
        self._bytes_read += len(text.encode())

    def _add(self, line: LedgerLine) -> None:
        """Add a line to the losses; the first one, to what is known of the ledger."""
        if not self.line_hashes:
            self._subject_name = str(line.get("subject", ""))
        self.line_hashes.append(_next_hash(self.last_hash, line))
        if "loss" not in line:
            return
        loss = np.array(line["loss"], dtype=float)
        run_name = line["run"]
        round_number = line["round"]
        self.entries[run_name, round_number] = loss
        self.spent = self.spent + loss
        self._runs_by_noise[line["noise"], round_number] = run_name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Prevent other processes from writing, and read what they have written."""
        if self.path is None:
            yield
            return
        with exclusive(self.path):
            self._read(self.path)
            self._mend(self.path)
            yield

    def _read(self, path: Path) -> None:
        """Read what the file holds beyond the lines that were read before.

        Raises:
            InputError: if a line does not belong to it, or lines are missing.
        """
        anchor = Anchor.of(path)
        self._is_anchored = anchor is not None
        self._anchor = anchor or self._anchor
        content = self._read_content(path)
        complete_lines = content[: content.rfind(b"\n") + 1]
        for text in complete_lines.decode("utf-8", "replace").splitlines():
            self._read_line(path, text)
        self._bytes_read += len(complete_lines)
        self._check_anchor(path)

    def _read_content(self, path: Path) -> bytes:
        """Return what the file holds beyond the bytes that were read before."""
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._bytes_read:
                lines = path.read_bytes().count(b"\n")
                raise _shortened(path, lines, len(self.line_hashes))
            file.seek(self._bytes_read)
            content = file.read()
        beginning = content[: len(HEADER_BEGINNING)]
        is_new = not self.line_hashes and b"\n" not in content
        if is_new and not HEADER_BEGINNING.startswith(beginning):
            raise InputError(
                "ledger",
                str(path),
                "a ledger, or a file that is not there yet: this is another file",
            )
        return content

    def _check_anchor(self, path: Path) -> None:
        """Refuse a ledger that lacks lines that its anchor counts."""
        anchored_lines = self._anchor.lines
        lines = len(self.line_hashes)
        if lines < anchored_lines:
            raise _shortened(path, lines, anchored_lines)
        if not anchored_lines:
            return
        line_hash = self.line_hashes[anchored_lines - 1]
        anchored_hash = self._anchor.last_hash
        if line_hash != anchored_hash:
            raise _damaged(
                path,
                f"the hash {line_hash[:SHOWN_DIGITS]}… in line {anchored_lines}",
                f"the ledger of its anchor {anchor_path(path).name}, where that line "
                f"has {anchored_hash[:SHOWN_DIGITS]}…: restore that ledger",
            )

    def _read_line(self, path: Path, text: str) -> None:
        """Verify a line of the file and add it to the losses."""
        number = len(self.line_hashes) + 1
        try:
            line = json.loads(text)
            line_hash = line.pop("chain")
            if number > 1:
                self._check_entry(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                "ledger", str(path), f"a ledger; line {number} is not one of its lines"
            ) from None
        self._add(line)
        if number == 1:
            self._refuse_foreign(path, line)
        if line_hash != self.last_hash:
            raise InputError(
                "ledger",
                str(path),
                f"as wflmc wrote it; line {number} or one above it has been changed",
            )

    def _check_entry(self, line: LedgerLine) -> None:
        """Raise ValueError, KeyError or TypeError for what is not a round's line."""
        loss = np.asarray(line["loss"], dtype=float)
        has_names = isinstance(line["noise"], str) and isinstance(line["run"], str)
        if not has_names or not isinstance(line["round"], int):
            raise ValueError
        if loss.shape != (self.devices,) or not np.all(loss >= 0):
            raise ValueError

    def _refuse_foreign(self, path: Path, header: LedgerLine) -> None:
        """Refuse a ledger of another version or promise, or about other data."""
        if header.get("ledger") != VERSION:
            raise InputError(
                "ledger",
                str(path),
                f"a ledger of version {VERSION}, which has an anchor",
            )
        for name, promised in self._promise.items():
            value = header.get(name)
            if value != promised:
                raise ForeignLedgerError(
                    "ledger",
                    f"{path} with {name} = {value}",
                    f"one with {name} = {promised}",
                )
        if self.subject and not self.is_about(self.subject):
            raise ForeignLedgerError("ledger", str(path), "about the same data")

    def _mend(self, path: Path) -> None:
        """Complete what a crash may have left behind, and begin a new ledger.

        A line that was cut short is removed; lines that the anchor does not count yet
        are anchored.
        """
        lines = len(self.line_hashes)
        if lines and not self._is_anchored:
            raise _without_anchor(path, lines)
        os.truncate(path, self._bytes_read)
        if not self._is_anchored or self._anchor.lines < lines:
            self._anchor = self._anchor._replace(lines=lines, last_hash=self.last_hash)
            self._anchor.save(path)
            self._is_anchored = True
        if not lines:
            self._append([self._header])


def _next_hash(previous_hash: str, line: LedgerLine) -> str:
    """Return the hash of a line and of all before it."""
    return hashlib.sha256((previous_hash + json.dumps(line)).encode()).hexdigest()


def refuse_overspending(budget: Array, total: Array, first: int) -> None:
    """Refuse rounds after which a device would have lost more than its budget.

    A relative rounding of 1e-9 is forgiven. An infinite budget is never exceeded.

    Args:
        budget: the largest loss of each device, [K].
        total: the loss of each device after every round, [round, K].
        first: the number of the first of these rounds, from 0.

    Raises:
        OverspendError: names the first such round, and the device whose loss is the
            largest in it, relative to its budget.
    """
    is_over = total > budget * (1 + TOLERANCE)
    if not is_over.any():
        return
    row = int(np.argmax(is_over.any(1)))
    device = int(np.argmax(total[row] / budget))
    loss = float(total[row, device])
    raise OverspendError(first + row, device, loss, float(budget[device]))


def _shortest(value: ArrayLike | None, devices: int) -> float | list[float] | None:
    """Return a single number where all devices have the same, else all of them."""
    if value is None:
        return None
    numbers = np.asarray(value, dtype=float).reshape(-1)
    by_device = np.broadcast_to(numbers, (devices,))
    if np.all(by_device == by_device[0]):
        return float(by_device[0])
    by_device_list: list[float] = by_device.tolist()
    return by_device_list
