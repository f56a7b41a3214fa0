"""The terms of a device, the requests of a round, and both as Flower's messages.

Whatever arrives from elsewhere is checked completely before it is used: a request that
is not of the device's run, and a reply that is not exactly what was requested, are
refused.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError

from wflmc.privacy import Ledger, Privacy
from wflmc.privacy.lattice import Lattice
from wflmc.support.errors import InputError, without_data

SERVER = "server"
"""The folder of the server in that of a federation."""
DEVICE = "device-{}"
"""The folder of a device, by its number."""
MAX_CHAINS = 10**7
"""How many chains a federation may run at the same time."""
MAX_ARRAY_HEADER_BYTES = 4096
"""How many bytes NumPy's array format may take beside the numbers of an array."""
BYTES_PER_FLOAT32 = 4
"""The size of an element of a signal."""
MAX_TEXT_LENGTH = 200
"""How many characters of a text from another machine are shown."""
PREPARED_BY_THIS_VERSION = (
    "prepared by this version of wflmc: begin a new federation elsewhere, with this "
    "one's ledger by --ledger"
)
"""What is allowed in place of a file of a federation that cannot be read."""


Positive = Annotated[float, Field(gt=0)]
"""A number above 0, which may be infinite."""
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, at least 0."""


@dataclass(frozen=True)
class Terms:
    """What a device has agreed to; it answers no request that goes beyond.

    The names of the fields are the keys of terms.json.
    """

    run: str
    """The name of the job, `Job.run`."""
    device: Annotated[int, Field(ge=0)]
    chains: Annotated[int, Field(ge=1, le=MAX_CHAINS)]
    dim: Annotated[int, Field(ge=1)]
    start: Annotated[int, Field(ge=0)]
    """The number of the first round."""
    gain: tuple[Finite, ...]
    """α r_k of every round, the largest amplitude at which its gradient is to arrive; 0
    where it is silent."""
    known: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    """|ĥ_k| of every round, the channel gain by the device's own estimate; 1 on an
    ideal link. The factor covers its error."""
    clip: Positive
    """ℓ_k."""
    example_clip: Positive
    """c_k; infinite where records are not clipped one by one."""
    rounding: Finite
    """e: clips act at ℓ/(1 + e) and c/(1 + e), see `Plan.rounding`."""
    noise_power: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """N0 of the sum."""
    share: Finite
    """The variance of the noise that the device adds itself; 0 where it relies on the
    noise of the channel."""
    step: Finite
    """Its messages are multiples of this step of the lattice, where it adds noise."""
    factor: Finite
    """What a round costs in units of 2 (α r s)²/N0, with the `sensitivity` s: more than
    1 where several chains are released, messages are seen one by one, or channels are
    known badly."""
    power: Positive
    """P: the largest ‖x‖² that it may transmit."""
    enforced: bool
    """Whether the device keeps to its budget; under a policy that ignores privacy the
    losses are still recorded."""
    simulated: bool
    """Whether the noise is that of a simulation, which protects nobody: answers are
    then computed again when they are requested again, and not stored."""
    promise: InstanceOf[Privacy]
    """The privacy that this device is promised."""

    @property
    def lattice(self) -> Lattice:
        """Return the lattice of its messages, and the width of its noise.

        The step is a power of two, and the standard deviation a whole number of steps,
        so that noise on the lattice is exact. Only terms with a positive `share` have a
        lattice: a step of 0 raises ZeroDivisionError.
        """
        return Lattice(self.step, round(self.share**0.5 / self.step))

    @property
    def sensitivity(self) -> float:
        """Return half of the largest change between neighbouring data sets.

        It is the change of the clipped gradient in norm, so that half of it is at most
        ℓ, and depends on the adjacency and the unit of the promise
        (`Privacy.half_change`). It may be infinite where the gradient is not clipped.
        """
        return float(self.promise.half_change(self.clip, self.example_clip))

    def open_ledger(self, folder: Path) -> Ledger:
        """Open the device's own ledger, or begin one.

        It has one device, whose budget is that of the promise, and is charged by
        `Device.answer` before a signal is sent. What the device had spent before the
        federation was prepared is in it only if `write_federation` knew of it.

        Args:
            folder: of the device; the file is ledger.jsonl.

        Returns:
            The ledger, which refuses to overspend where the terms are enforced.
        """
        return Ledger(
            self.promise, 1, enforced=self.enforced, path=folder / "ledger.jsonl"
        )

    def save(self, path: Path) -> None:
        """Write the terms as JSON, one key for each field.

        They contain no data of the device. An infinite clip or power is written as
        JavaScript's Infinity, which `load` reads.

        Args:
            path: the file, terms.json in the folder of a device.
        """
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the terms that `save` has written, and check them.

        Every value must be in its range, `gain` and `known` must have a value for each
        round, and a device that adds noise needs the step of its lattice. Keys that are
        missing or unknown are refused, too.

        Args:
            path: the file.

        Returns:
            The terms, equal to those that were saved.

        Raises:
            InputError: the file is missing, damaged, or of another version.
        """
        try:
            text = path.read_text(encoding="utf-8")
            content = dict(json.loads(text))
            content["promise"] = Privacy(**content["promise"])
            terms = TypeAdapter(cls).validate_python(content)
            _check_terms(terms, keys=content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            expected = f"{PREPARED_BY_THIS_VERSION} ({field}: {first['msg']})"
            raise InputError("terms", str(path), expected) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            expected = f"{PREPARED_BY_THIS_VERSION} ({error})"
            raise InputError("terms", str(path), expected) from None
        return terms


def _check_terms(terms: Terms, keys: Collection[str]) -> None:
    """Refuse terms from a file with other keys, or whose fields contradict."""
    expected_keys = set(asdict(terms))
    if set(keys) != expected_keys or len(terms.gain) != len(terms.known):
        raise ValueError("other keys, or gain and known of different lengths")
    if terms.share > 0 and not terms.step > 0:
        raise ValueError("a share of the noise, but no step")


@without_data
class RoundRequest(NamedTuple):
    """What a server requests of a device in a round."""

    device: int
    round: int
    """The number of the round, which counts on over runs of a ledger."""
    theta: NDArray[np.floating]
    """Where the chains are, as the device receives it, [chain, m]."""
    gain: float
    """α r_k, the amplitude at which its gradient is to arrive."""
    channel_estimate: float
    """|ĥ_k|, what it knows of its channel; a device refuses another value than its
    own."""
    channel_gain: float = 1.0
    """|h_k|, by which the channel multiplies its signal; not sent to the device."""
    batch: NDArray[np.uint32] | None = None
    """Keys of its mini-batches, one for each chain."""

    @property
    def precoder(self) -> float:
        """Return the factor on the clipped gradient before it is transmitted.

        It is α r_k/|ĥ_k|, which inverts the channel as far as the server knows it: the
        gradient then arrives at the amplitude `gain`. The device itself divides by its
        own estimate of the channel.
        """
        return self.gain / self.channel_estimate


@without_data
class Reception(NamedTuple):
    """What the server has received in a round."""

    total: NDArray[np.floating]
    """Σ_k h_k x_k over the devices that sent, [chain, m]."""
    sent: NDArray[np.bool_]
    """Which devices sent, [K]."""
    absent: dict[int, str]
    """Why other scheduled devices did not send, by device."""


class RejectedError(Exception):
    """A reply that does not answer the request; its device counts as absent."""


@without_data
class AddressedRequest(NamedTuple):
    """A request as a device reads it from a message."""

    request: RoundRequest
    nonce: str
    """To be repeated in the reply, which is valid for this message alone."""


def write_request(request: RoundRequest, run: str, nonce: str) -> RecordDict:
    """Write a request as the content of a Flower message.

    The gain of the channel is not in it: a device learns only what it needs in order to
    compute and precode its gradient.

    Args:
        request: to a device.
        run: the name of the job, `Job.run`.
        nonce: unpredictable, and another one for every message.

    Returns:
        One array record, θ, and one record of numbers and texts.
    """
    content = _subject(request, run, nonce)
    content["gain"] = request.gain
    content["known"] = request.channel_estimate
    if request.batch is not None:
        content["batch"] = [int(word) for word in request.batch.ravel()]
    theta = np.ascontiguousarray(request.theta)
    return RecordDict({"theta": ArrayRecord([theta]), "ask": content})


def read_request(content: RecordDict, run: str) -> AddressedRequest:
    """Read a request from the content of a Flower message.

    Only the form is checked here. Whether the device has agreed to such a request is
    checked by `Device.answer`.

    Args:
        content: of the message, from `write_request`.
        run: of the terms; requests of another run are refused.

    Returns:
        The request, without the gain of the channel, and the nonce of its message.

    Raises:
        InputError: the content is no request, or one of another run.
    """
    try:
        fields = content.config_records["ask"]
        (theta,) = content.array_records["theta"].to_numpy_ndarrays()
        batch = None
        words = fields.get("batch")
        if words is not None:
            batch = np.array(words, np.uint32).reshape(len(theta), -1)
        request = RoundRequest(
            device=int(fields["device"]),
            round=int(fields["round"]),
            theta=theta,
            gain=float(fields["gain"]),
            channel_estimate=float(fields["known"]),
            batch=batch,
        )
        run_of_request = fields["run"]
        nonce = str(fields["nonce"])
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        expected = "a request of a wflmc server"
        raise InputError("request", "something else", expected) from None
    if run_of_request != run:
        expected = f"run {run}, to which this device has agreed"
        raise InputError("request", f"run {run_of_request}", expected)
    return AddressedRequest(request, nonce)


def write_reply(
    message: Message,
    signal: NDArray[np.float32],
    *,
    request: RoundRequest,
    run: str,
    nonce: str,
) -> Message:
    """Write the reply of a device to the message with a request.

    Args:
        message: that is answered.
        signal: x_k[chain, m], charged already.
        request: that was in the message.
        run: the name of the job.
        nonce: of the message.

    Returns:
        A message with one array record, the signal, and one record that identifies the
        request, which `read_reply` compares.
    """
    content = {
        "signal": ArrayRecord([signal]),
        "about": _subject(request, run, nonce),
    }
    return Message(RecordDict(content), reply_to=message)


def _subject(request: RoundRequest, run: str, nonce: str) -> ConfigRecord:
    """Return what identifies the request that a message belongs to."""
    return ConfigRecord(
        {"run": run, "round": request.round, "device": request.device, "nonce": nonce}
    )


def read_reply(
    message: Message | None,
    request: RoundRequest,
    *,
    run: str,
    nonce: str,
    norm_limit: float,
) -> NDArray[np.float32]:
    """Read the signal from the reply to a request, which must be exactly as expected.

    Args:
        message: the reply; None where Flower could not put it together.
        request: that it must answer.
        run: the name of the job.
        nonce: of the message with the request; a reply with another one is a replay.
        norm_limit: the largest norm that the signal of a chain can have, by
            `Job.largest_norm`.

    Returns:
        The signal x_k[chain, m] in float32, within the limit.

    Raises:
        RejectedError: the reply is malformed, oversized, not finite, or belongs to
            another request.
    """
    reply = _reply_records(message)
    _check_subject(reply.subject, expected=_subject(request, run, nonce))
    signal = _read_signal(reply.signal, request.theta.shape)
    _check_norm(signal, norm_limit)
    return signal


class _ReplyRecords(NamedTuple):
    """The two records of a reply."""

    signal: ArrayRecord
    subject: ConfigRecord


def _reply_records(message: Message | None) -> _ReplyRecords:
    """Return the records of a reply, or reject it where it has others."""
    malformed = "malformed: not one array and one text record"
    if message is None:
        raise RejectedError(malformed)
    arrays = message.content.array_records
    texts = message.content.config_records
    names_fit = list(arrays) == ["signal"] and list(texts) == ["about"]
    if len(message.content) != 2 or not names_fit:
        raise RejectedError(malformed)
    return _ReplyRecords(arrays["signal"], texts["about"])


def _check_subject(subject: ConfigRecord, expected: ConfigRecord) -> None:
    """Reject a reply that belongs to another request, or to another message."""
    for name, value in expected.items():
        if subject.get(name) != value:
            raise RejectedError(
                f"replayed or meant for others: {name} is not that of the request"
            )


def _read_signal(
    record: ArrayRecord,
    shape: tuple[int, ...],
) -> NDArray[np.float32]:
    """Return the array of a record, or reject it unless it has this shape."""
    # The size is checked before the bytes are read: a header may promise anything.
    size = sum(len(array.data) for array in record.values())
    signal_bytes = BYTES_PER_FLOAT32 * shape[0] * shape[1]
    if size > signal_bytes + MAX_ARRAY_HEADER_BYTES:
        raise RejectedError(f"oversized: {size} bytes for {signal_bytes}")
    try:
        (signal,) = record.to_numpy_ndarrays()
    except Exception as error:
        # Bytes from another machine may raise errors of any type.
        raise RejectedError(f"malformed: no array ({type(error).__name__})") from None
    # NumPy reads archives from the same bytes, which are no arrays.
    is_array = isinstance(signal, np.ndarray)
    if not is_array or signal.shape != shape or signal.dtype != np.float32:
        raise RejectedError(f"malformed: not float32 of shape {shape}")
    return signal


def _check_norm(signal: NDArray[np.float32], limit: float) -> None:
    """Reject a signal in which a chain is not finite, or longer than the limit."""
    norms = np.linalg.norm(signal.astype(float), axis=1)
    largest = float(norms.max())
    if largest <= limit:
        return
    if not np.isfinite(largest):
        raise RejectedError("not finite")
    raise RejectedError(
        f"oversized: norm {largest:.4g} where clipping leaves at most {limit:.4g}"
    )


def printable_line(text: object) -> str:
    """Return the beginning of a text from another machine, safe to print.

    White space becomes single blanks, so that the text is one line. Characters that are
    not printable become question marks: none of it is a command to a terminal.

    Args:
        text: shown as `str` gives it.

    Returns:
        At most `MAX_TEXT_LENGTH` printable characters.
    """
    words = str(text).split()
    line = " ".join(words)[:MAX_TEXT_LENGTH]
    return "".join(letter if letter.isprintable() else "?" for letter in line)
