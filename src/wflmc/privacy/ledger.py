"""The ledger: what every device has spent, round by round, written down before anything is sent.

A ledger file has one JSON object a line and only ever grows. The first line says whose data it is about and what they
were promised; every further one is a round. Each line carries a hash of itself and of the line before, so that an
edited file is noticed, and a line that a crash cut short, which was never acted upon, is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError, OverspendError
from wflmc.privacy.promise import Privacy
from wflmc.storage import naming_file

try:
    import fcntl
except ImportError:  # not a POSIX system: one process at a time, then
    fcntl = None  # type: ignore[assignment]

Array = NDArray[np.float64]

TOLERANCE = 1e-9
"""Relative rounding that plans and ledgers forgive each other."""


class ForeignLedgerError(InputError):
    """A ledger about other data, or of another promise."""


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
        wflmc.errors.OverspendError: Round 3 would bring device 0 to a loss of 3.1, above its budget ...
    """

    def __init__(
        self,
        privacy: Privacy,
        devices: int,
        *,
        subject: str = "",
        enforced: bool = True,
        path: str | Path | None = None,
    ) -> None:
        """A ledger in memory, or in a file that is begun where there is none and continued where there is one.

        Args:
            subject: whose data the losses are about, such as `posterior.digest`; a file about others is refused.
            enforced: whether budgets are kept to; a policy that ignores privacy is still written down.
        """
        self.privacy, self.devices, self.path = privacy, devices, None if path is None else Path(path)
        self.subject = subject
        self.budget = privacy.budget(devices) if enforced else np.full(devices, np.inf)
        self.spent = np.zeros(devices)
        self.entries: dict[tuple[str, int], Array] = {}
        self.chains: list[str] = []
        self._noise: dict[tuple[str, int], str] = {}
        self._header = {
            "ledger": 1,
            "subject": subject,
            "devices": devices,
            "unit": privacy.unit,
            "epsilon": _plain(privacy.epsilon, devices),
            "delta": _plain(privacy.delta, devices),
            "accountant": privacy.accountant,
            "adjacency": privacy.adjacency,
        }
        self._size = 0
        if self.path is None:
            self._take(self._header)
            return
        with self.path.open("a"):  # made where there is none
            pass
        with self._alone():
            pass

    @property
    def chain(self) -> str:
        """The hash of the last line, which stands for the whole ledger."""
        return self.chains[-1]

    def check(self, first: int, losses: ArrayLike) -> None:
        """Refuse rounds first, first + 1, … with losses[round, device] if one of them would overspend a device."""
        given = np.asarray(losses, dtype=float)
        if given.ndim != 2 or given.shape[1] != self.devices or not np.all(given >= 0):
            raise InputError("losses", f"shape {given.shape}", f"losses of at least 0 for {self.devices} devices")
        refuse_overspending(self.budget, self.spent + np.cumsum(given, axis=0), first)

    def charge(self, run: str, first: int, losses: ArrayLike, noise: str = "") -> None:
        """Write down rounds of a run before they are sent, or refuse them.

        A round that the same run has been charged for already costs nothing again: sent with the same noise, it tells
        the server nothing new.

        Args:
            run: what is sent: a digest of the plan, the data and the seed.
            noise: a name for the noise of the run. Another run with the same noise in the same round is refused: who
                sees both could take the noise away.
        """
        with self._alone():
            rows = np.asarray(losses, dtype=float)
            fresh = []
            for number, row in enumerate(rows, start=first):
                known = self.entries.get((run, number))
                if known is None:
                    if noise and self._noise.get((noise, number), run) != run:
                        raise InputError(
                            "seed",
                            f"the noise that another run of this ledger had in round {number + 1}",
                            "another one: who sees two rounds with the same noise can take it away",
                        )
                    fresh.append((number, row))
                elif not np.allclose(known, row, rtol=TOLERANCE, atol=0):
                    raise InputError("ledger", f"another loss for round {number + 1}", "the one of the same run")
            if fresh:
                self.check(fresh[0][0], [row for _, row in fresh])
                about = {"run": run, "noise": noise}
                self._append([{**about, "round": number, "loss": row.tolist()} for number, row in fresh])

    def rounds(self, run: str) -> int:
        """How many rounds of a run have been charged."""
        return sum(name == run for name, _ in self.entries)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        text, chain = "", self.chain if self.chains else ""
        for line in lines:
            chain = _chained(chain, line)
            text += json.dumps({**line, "chain": chain}) + "\n"
        if self.path is not None:
            try:
                with naming_file(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, self._size)  # nothing of it will be sent
                raise
            self._size += len(text.encode())
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        """Add a line to what is known."""
        self.chains.append(_chained(self.chain if self.chains else "", line))
        if "loss" in line:
            loss = self.entries[line["run"], line["round"]] = np.array(line["loss"])
            self.spent = self.spent + loss
            self._noise[line["noise"], line["round"]] = line["run"]

    def _catch_up(self) -> None:
        """Read what the file holds beyond what is known, and refuse what does not belong to it."""
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(self._size)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for text in whole.decode("utf-8", "replace").splitlines():
            number = len(self.chains) + 1
            try:
                line = json.loads(text)
                chain = line.pop("chain")
                if number > 1 and (
                    not isinstance(line["noise"], str)
                    or len(line["loss"]) != self.devices
                    or not np.all(np.asarray(line["loss"]) >= 0)
                ):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError("ledger", str(self.path), f"a ledger; line {number} is not one of its lines") from None
            if number == 1:
                self._refuse_others(line)
            self._take(line)
            if chain != self.chain:
                raise InputError(
                    "ledger", str(self.path), f"as wflmc wrote it; line {number} or one above it has been changed"
                )
        self._size += len(whole)
        if len(whole) < len(content):
            os.truncate(self.path, self._size)
        if not self.chains:
            self._append([self._header])

    def _refuse_others(self, header: dict[str, Any]) -> None:
        for name, own in self._header.items():
            found = header.get(name, "replace" if name == "adjacency" else None)  # ledgers of old have no adjacency
            if found != own:
                what = "about the same data" if name == "subject" else f"one with {name} = {own}"
                raise ForeignLedgerError("ledger", f"{self.path} with {name} = {found}", what)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from writing, and learn what they have written."""
        if self.path is None:
            yield
            return
        with self.path.open("rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up()
            yield


def _chained(before: str, line: dict[str, Any]) -> str:
    """The hash of a line and of all before it."""
    return hashlib.sha256((before + json.dumps(line)).encode()).hexdigest()


def refuse_overspending(budget: Array, total: Array, first: int) -> None:
    """OverspendError for the first round of total[round, device], counted from `first`, above a device's budget."""
    over = total > budget * (1 + TOLERANCE)
    if over.any():
        at = int(np.argmax(over.any(1)))
        device = int(np.argmax(total[at] / budget))
        raise OverspendError(first + at, device, float(total[at, device]), float(budget[device]))


def _plain(value: ArrayLike | None, devices: int) -> Any:
    """One number where all devices have the same, else one for each."""
    if value is None:
        return None
    each = np.broadcast_to(np.asarray(value, dtype=float).reshape(-1), (devices,))
    return float(each[0]) if np.all(each == each[0]) else each.tolist()
