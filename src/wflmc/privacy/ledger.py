"""The ledger: what every device has spent, round by round, written down before anything is sent.

A ledger file has one JSON object a line and only ever grows. The first line says whose data it is about and what they
were promised; every further one is a round. Each line carries a hash of itself and of the line before, so that an
edited file is noticed, and a line that a crash cut short, which was never acted upon, is dropped.

Beside it, `people.jsonl.head` is its anchor: how many lines it has, the hash of the last, and a secret. Lines are on
the disk before the anchor counts them, so that after a crash it may count too few, never too many: a ledger with fewer
lines has been shortened. Names of data, runs and noise are written as HMACs with the secret, which only the owner of
the anchor can compute: a bare hash of data tells who knows all but one label which one it is.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from wflmc.privacy.accountants import Array
from wflmc.privacy.promise import Privacy
from wflmc.support.errors import InputError, OverspendError
from wflmc.support.storage import append_text, exclusive, replacing

TOLERANCE = 1e-9
"""Relative rounding that plans and ledgers forgive each other."""
VERSION = 2
"""Of the file; ledgers of version 1 had no anchor, and nobody could tell whether lines were missing."""
BEGIN = b'{"ledger": 2, '
"""The first characters of its first line, which a crash may have cut short."""


class ForeignLedgerError(InputError):
    """A ledger about other data, or of another promise."""


class Anchor(NamedTuple):
    """The length of a ledger when it was last written, and the secret of its names."""

    lines: int
    chain: str
    """The hash of the last of them; empty where there is none."""
    salt: bytes

    @classmethod
    def of(cls, ledger: Path) -> Self | None:
        """Return the anchor beside a ledger; None where there is none that may be read."""
        try:
            content = json.loads(anchor_path(ledger).read_text(encoding="utf-8"))
            if not isinstance(content["lines"], int) or content["lines"] < 0:
                raise ValueError
            return cls(
                content["lines"], str(content["chain"]), bytes.fromhex(content["salt"])
            )
        except (FileNotFoundError, PermissionError):
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                "ledger", str(anchor_path(ledger)), "as wflmc wrote it"
            ) from None

    def save(self, ledger: Path) -> None:
        """Write it whole or not at all, for its owner alone."""
        with replacing(anchor_path(ledger), mode=0o600) as file:
            file.write(
                json.dumps(
                    {"lines": self.lines, "chain": self.chain, "salt": self.salt.hex()}
                ).encode()
            )

    def name(self, text: str) -> str:
        """Return what stands for a name in the file."""
        return (
            text and hmac.new(self.salt, text.encode(), hashlib.sha256).hexdigest()[:32]
        )


def anchor_path(ledger: str | Path) -> Path:
    """Return the file that anchors a ledger."""
    return Path(f"{ledger}.head")


def move_ledger(path: Path, target: Path) -> None:
    """Give a ledger another name, and its anchor with it."""
    os.replace(path, target)
    if anchor_path(path).exists():
        os.replace(anchor_path(path), anchor_path(target))


def noise_of_another_run(path: Path, run: str, noise: str) -> bool:
    """Return whether a ledger, of whatever promise, has a round of another run with this noise."""
    anchor, lines = Anchor.of(path), []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, RecursionError):  # no line of a ledger
            lines.append(dict(json.loads(text)))
    if anchor is None:
        if lines:
            raise _without_anchor(path, len(lines))
        return False
    here = anchor.name(run), anchor.name(noise)
    return any(
        line.get("noise") == here[1] and line.get("run") != here[0] for line in lines
    )


def _damaged(path: Path, given: str, allowed: str) -> InputError:
    anew = "or delete both to begin a new ledger, which does not know what has been spent so far"
    return InputError("ledger", f"{path} with {given}", f"{allowed}, {anew}")


def _shortened(path: Path, lines: int, wanted: int) -> InputError:
    allowed = f"as long as it was: its anchor {anchor_path(path).name} counts {wanted}. Restore the longer copy"
    return _damaged(path, f"{lines} line{'s' * (lines != 1)}", allowed)


def _without_anchor(path: Path, lines: int) -> InputError:
    allowed = f"beside its anchor {anchor_path(path).name}, which is missing or not yours to read: restore it"
    return _damaged(path, f"{lines} lines", allowed)


class Ledger:
    """Losses of every device, and the budgets that no round may exceed.

    Examples:
        >>> ledger = Ledger(Privacy(epsilon=8, delta=0.01), devices=2)
        >>> ledger.charge("a", 0, [[1.0, 0.0], [1.5, 0.0]])
        >>> ledger.charge("a", 1, [[1.5, 0.0]])  # the same round of the same run again: nothing new is sent
        >>> ledger.spent.tolist()
        [2.5, 0.0]
        >>> ledger.charge("a", 2, [[0.6, 0.1]])
        Traceback (most recent call last):
        wflmc.support.errors.OverspendError: Round 3 would bring device 0 to a loss of 3.1, above its budget ...
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
        """Open a ledger in memory, or in a file that is begun where there is none and continued where there is one.

        Args:
            subject: whose data the losses are about, such as `posterior.digest`; a file about others is refused. The
                file has an HMAC of it, with a secret that is kept in the anchor beside the file.
            enforced: whether budgets are kept to; a policy that ignores privacy is still written down.
            read_only: verify a file and leave it as it is, with or without its anchor; charges stay in memory.
        """
        self.privacy, self.devices, self.subject = privacy, devices, subject
        self.path = None if path is None else Path(path)
        self.budget = privacy.budget(devices) if enforced else np.full(devices, np.inf)
        self.spent = np.zeros(devices)
        self.entries: dict[tuple[str, int], Array] = {}
        self.chains: list[str] = []
        self._noise: dict[tuple[str, int], str] = {}
        self._anchor = Anchor(0, "", secrets.token_bytes(32))
        self._anchored = True
        """Whether the anchor is that of the file."""
        self._subject_name = ""
        """The subject as the file has it."""
        self._size = 0
        if self.path is None:
            self._append([self._header])
        elif read_only:
            self._read(self.path)
            self.path = None
        else:
            with self._locked():
                pass

    @property
    def _header(self) -> dict[str, Any]:
        return {"ledger": 2, "subject": self.name(self.subject), **self._promise}

    @property
    def _promise(self) -> dict[str, Any]:
        kind = {
            name: getattr(self.privacy, name)
            for name in ("unit", "accountant", "adjacency")
        }
        limits = {
            name: _plain(getattr(self.privacy, name), self.devices)
            for name in ("epsilon", "delta")
        }
        return {"devices": self.devices, **kind, **limits}

    def name(self, text: str) -> str:
        """Return the name of data, a run or noise as this ledger writes it: an HMAC with the ledger's secret."""
        return self._anchor.name(text)

    def is_about(self, subject: str) -> bool:
        """Return whether this may be whose data it is about; unknown where it names none or has no anchor."""
        return not self._anchored or self._subject_name in (
            "",
            subject,
            self.name(subject),
        )

    @property
    def chain(self) -> str:
        """The hash of the last line, which stands for the whole ledger; empty where there is no line."""
        return self.chains[-1] if self.chains else ""

    def check(self, first: int, losses: ArrayLike) -> None:
        """Refuse rounds first, first + 1, … with losses[round, device] if one of them would overspend a device."""
        given = np.asarray(losses, dtype=float)
        if given.ndim != 2 or given.shape[1] != self.devices or not np.all(given >= 0):
            raise InputError(
                "losses",
                f"shape {given.shape}",
                f"losses of at least 0 for {self.devices} devices",
            )
        refuse_overspending(self.budget, self.spent + np.cumsum(given, axis=0), first)

    def charge(self, run: str, first: int, losses: ArrayLike, noise: str = "") -> None:
        """Write down rounds of a run before they are sent, or refuse them.

        A round that the same run has been charged for already costs nothing again: sent with the same noise, it tells
        the server nothing new.

        Args:
            run: what is sent: a digest of the plan, the data and the seed.
            first: the number of the first round.
            losses: of every round and device, [round, device].
            noise: a name for the noise of the run. Another run with the same noise in the same round is refused: who
                sees both could take the noise away.
        """
        with self._locked():
            run, noise = self.name(run), self.name(noise)
            fresh = []
            for number, row in enumerate(np.asarray(losses, dtype=float), start=first):
                known = self.entries.get((run, number))
                if known is not None and not np.allclose(
                    known, row, rtol=TOLERANCE, atol=0
                ):
                    raise InputError(
                        "ledger",
                        f"another loss for round {number + 1}",
                        "the one of the same run",
                    )
                if (
                    known is None
                    and noise
                    and self._noise.get((noise, number), run) != run
                ):
                    given = f"the noise that another run of this ledger had in round {number + 1}"
                    allowed = "another one: who sees two rounds with the same noise can take it away"
                    raise InputError("seed", given, allowed)
                if known is None:
                    fresh.append(
                        {
                            "run": run,
                            "noise": noise,
                            "round": number,
                            "loss": row.tolist(),
                        }
                    )
            if fresh:
                self.check(fresh[0]["round"], [line["loss"] for line in fresh])
                self._append(fresh)

    def rounds(self, run: str) -> int:
        """Return how many rounds of a run have been charged."""
        name = self.name(run)
        return sum(charged == name for charged, _ in self.entries)

    def paid(self, run: str, number: int) -> Array | None:
        """Return what a round of a run was charged, [K]; None where it was not."""
        return self.entries.get((self.name(run), number))

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Write lines to the file, if there is one, and add them to what is known."""
        text, chain = "", self.chain
        for line in lines:
            chain = _chained(chain, line)
            text += json.dumps({**line, "chain": chain}) + "\n"
        if self.path is not None:
            anchor = self._anchor._replace(
                lines=len(self.chains) + len(lines), chain=chain
            )
            try:
                append_text(self.path, text)
                anchor.save(self.path)
            except OSError:
                os.truncate(self.path, self._size)  # nothing of it will be sent
                raise
            self._anchor = anchor
            self._size += len(text.encode())
        for line in lines:
            self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        """Add a line to what is known."""
        if not self.chains:
            self._subject_name = str(line.get("subject", ""))
        self.chains.append(_chained(self.chain, line))
        if "loss" in line:
            loss = self.entries[line["run"], line["round"]] = np.array(
                line["loss"], dtype=float
            )
            self.spent = self.spent + loss
            self._noise[line["noise"], line["round"]] = line["run"]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing, and learn what they have written."""
        if self.path is None:
            yield
            return
        with exclusive(self.path):
            self._read(self.path)
            self._mend(self.path)
            yield

    def _read(self, path: Path) -> None:
        """Read what the file holds beyond what is known, and refuse what does not belong to it or is missing."""
        anchor = Anchor.of(path)
        self._anchor, self._anchored = anchor or self._anchor, anchor is not None
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                raise _shortened(path, path.read_bytes().count(b"\n"), len(self.chains))
            file.seek(self._size)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if (
            not self.chains
            and not whole
            and not BEGIN.startswith(content[: len(BEGIN)])
        ):
            raise InputError(
                "ledger",
                str(path),
                "a ledger, or a file that is not there yet: this is another file",
            )
        for text in whole.decode("utf-8", "replace").splitlines():
            self._read_line(path, text)
        self._size += len(whole)
        counted, known = self._anchor.lines, len(self.chains)
        if known < counted:
            raise _shortened(path, known, counted)
        if counted and self.chains[counted - 1] != self._anchor.chain:
            given = f"the hash {self.chains[counted - 1][:12]}… in line {counted}"
            there = f"the ledger of its anchor {anchor_path(path).name}, where that line has {self._anchor.chain[:12]}…"
            raise _damaged(path, given, f"{there}: restore that ledger")

    def _read_line(self, path: Path, text: str) -> None:
        """Verify a line of the file and add it to what is known."""
        number = len(self.chains) + 1
        try:
            line = json.loads(text)
            chain = line.pop("chain")
            if number > 1:
                loss = np.asarray(line["loss"], dtype=float)
                named = isinstance(line["noise"], str) and isinstance(line["run"], str)
                numbered = isinstance(line["round"], int)
                if (
                    not named
                    or not numbered
                    or loss.shape != (self.devices,)
                    or not np.all(loss >= 0)
                ):
                    raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                "ledger", str(path), f"a ledger; line {number} is not one of its lines"
            ) from None
        self._add(line)
        if number == 1:
            self._refuse_others(path, line)
        if chain != self.chain:
            raise InputError(
                "ledger",
                str(path),
                f"as wflmc wrote it; line {number} or one above it has been changed",
            )

    def _refuse_others(self, path: Path, header: dict[str, Any]) -> None:
        if header.get("ledger") != VERSION:
            raise InputError(
                "ledger",
                str(path),
                f"a ledger of version {VERSION}, which has an anchor",
            )
        for name, promised in self._promise.items():
            given = header.get(
                name, "replace" if name == "adjacency" else None
            )  # ledgers of old have no adjacency
            if given != promised:
                raise ForeignLedgerError(
                    "ledger",
                    f"{path} with {name} = {given}",
                    f"one with {name} = {promised}",
                )
        if self.subject and not self.is_about(self.subject):
            raise ForeignLedgerError("ledger", str(path), "about the same data")

    def _mend(self, path: Path) -> None:
        """Remove a line that was cut short; begin a new ledger, an anchor, or one that a crash has left behind."""
        known = len(self.chains)
        if known and not self._anchored:
            raise _without_anchor(path, known)
        os.truncate(path, self._size)
        if not self._anchored or self._anchor.lines < known:
            self._anchor = self._anchor._replace(lines=known, chain=self.chain)
            self._anchor.save(path)
            self._anchored = True
        if not known:
            self._append([self._header])


def _chained(before: str, line: dict[str, Any]) -> str:
    """Return the hash of a line and of all before it."""
    return hashlib.sha256((before + json.dumps(line)).encode()).hexdigest()


def refuse_overspending(budget: Array, total: Array, first: int) -> None:
    """Raise OverspendError for the first round of total[round, device], counted from `first`, above a budget."""
    over = total > budget * (1 + TOLERANCE)
    if over.any():
        at = int(np.argmax(over.any(1)))
        device = int(np.argmax(total[at] / budget))
        raise OverspendError(
            first + at, device, float(total[at, device]), float(budget[device])
        )


def _plain(value: ArrayLike | None, devices: int) -> Any:
    """Return one number where all devices have the same, else one for each."""
    if value is None:
        return None
    each = np.broadcast_to(np.asarray(value, dtype=float).reshape(-1), (devices,))
    return float(each[0]) if np.all(each == each[0]) else each.tolist()
