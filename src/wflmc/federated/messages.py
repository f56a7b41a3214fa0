"""What goes over the wire, in Flower's records, and what is refused of what comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from wflmc.errors import InputError, OverspendError
from wflmc.federated.device import Device
from wflmc.federated.job import Job
from wflmc.federated.terms import Ask

log = logging.getLogger("wflmc.federated")

HEADER = 4096
"""Bytes that an array of NumPy's may take beside its numbers."""
SLACK = 1e-3
"""Relative rounding by which a clipped gradient of float32 may exceed its limit."""
TAIL = 8.0
"""Standard deviations of a device's own noise beyond what may be expected of it; more has a chance of 1e-14."""


UNTOLD = "the device could not answer; its own log says why"


class RejectedError(Exception):
    """A reply that is not one; its device counts as absent."""


@contextmanager
def told_briefly() -> Iterator[None]:
    """Flower tells the server the text of whatever a device raises: keep in it nothing that comes from the data."""
    try:
        yield
    except (InputError, OverspendError) as error:
        log.warning("Request refused: %s", error)
        raise PermissionError(f"refused by the device: {error}") from None
    except Exception:
        log.exception("The device could not answer.")
        raise RuntimeError(UNTOLD) from None


def untold(find: Callable[[Context], Device]) -> Callable[[Context], Device]:
    """The same function, but what it finds wrong, as with the data of a device, is for the device's own log alone."""

    def found(context: Context) -> Device:
        try:
            return find(context)
        except Exception:
            log.exception("The device could not be opened.")
            raise RuntimeError(UNTOLD) from None

    return found


def request(ask: Ask, run: str, nonce: str) -> RecordDict:
    """What a device is sent."""
    content = about(ask, run, nonce)
    content["gain"], content["known"] = ask.gain, ask.known
    if ask.batch is not None:
        content["batch"] = [int(word) for word in ask.batch.ravel()]
    return RecordDict({"theta": ArrayRecord([np.ascontiguousarray(ask.theta)]), "ask": content})


def read_request(content: RecordDict, run: str) -> tuple[Ask, str]:
    """What a device is asked, and the nonce to answer with; a request of another run is refused."""
    try:
        asked, (theta,) = content.config_records["ask"], content.array_records["theta"].to_numpy_ndarrays()
        found: dict[str, Any] = {name: asked[name] for name in ("run", "round", "device", "nonce", "gain", "known")}
        words = asked.get("batch")
        batch = None if words is None else np.array(words, np.uint32).reshape(len(theta), -1)
        ask = Ask(int(found["device"]), int(found["round"]), theta, float(found["gain"]), float(found["known"]))
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        raise InputError("request", "something else", "a request of a wflmc server") from None
    if found["run"] != run:
        raise InputError("request", f"run {found['run']}", f"run {run}, to which this device has agreed")
    return ask._replace(batch=batch), str(found["nonce"])


def reply(message: Message, signal: NDArray[np.float32], ask: Ask, run: str, nonce: str) -> Message:
    """What a device answers."""
    return Message(RecordDict({"signal": ArrayRecord([signal]), "about": about(ask, run, nonce)}), reply_to=message)


def about(ask: Ask, run: str, nonce: str) -> ConfigRecord:
    """What a device says that its reply is about."""
    return ConfigRecord({"run": run, "round": ask.round, "device": ask.device, "nonce": nonce})


def refuse_other(found: object, ask: Ask, run: str, nonce: str) -> None:
    """RejectedError for a reply that is not about what was asked."""
    if not isinstance(found, ConfigRecord):
        raise RejectedError("malformed: does not say what it is about")
    other = [name for name, value in about(ask, run, nonce).items() if found.get(name) != value]
    if other:
        raise RejectedError(f"replayed or meant for others: {other[0]} is not the one that was asked")


def read_reply(message: Message, ask: Ask, job: Job, nonce: str) -> NDArray[np.float32]:
    """x_k[chain, m] of a reply; RejectedError for whatever is not exactly what was asked for."""
    if message.has_error():
        raise RejectedError(f"error {message.error.code}: {short(message.error.reason)}")
    content = message.content
    if set(content) != {"signal", "about"}:
        raise RejectedError(f"malformed: records {short(sorted(map(str, content)))}")
    record = content["signal"]
    if not isinstance(record, ArrayRecord) or len(record) != 1:
        raise RejectedError("malformed: not one array and one text record")
    refuse_other(content["about"], ask, job.run, nonce)
    (array,) = record.values()
    shape = (job.chains, job.plan.dim)
    if len(array.data) > 4 * shape[0] * shape[1] + HEADER:
        raise RejectedError(f"oversized: {len(array.data)} bytes for {4 * shape[0] * shape[1]}")
    try:
        signal = array.numpy()
    except Exception as error:  # bytes from elsewhere fail in whatever way they like
        raise RejectedError(f"malformed: no array ({type(error).__name__})") from None
    if not isinstance(signal, np.ndarray):  # NumPy reads archives, too
        raise RejectedError("malformed: no array")
    if signal.shape != shape or signal.dtype != np.float32:
        raise RejectedError(f"malformed: {signal.dtype} of shape {signal.shape}, not float32 of {shape}")
    if not np.all(np.isfinite(signal)):
        raise RejectedError("not finite")
    norm, limit = float(np.linalg.norm(signal.astype(float), axis=1).max()), _limit(ask, job)
    if norm > limit:
        raise RejectedError(f"oversized: norm {norm:.4g} where clipping leaves at most {limit:.4g}")
    return np.asarray(signal)


def _limit(ask: Ask, job: Job) -> float:
    """The most that a clipped, precoded gradient can measure, with the noise that its device adds."""
    clipped = ask.precoder * float(job.plan.clip[ask.device])
    own = job.lattice.variance**0.5 if job.noise == "devices" and job.lattice else 0.0
    return (clipped + own * (np.sqrt(job.plan.dim) + TAIL)) * (1 + SLACK)


def short(text: object) -> str:
    """The beginning of a text that came from elsewhere, in one line that no terminal takes for a command."""
    line = " ".join(str(text).split())[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in line)
