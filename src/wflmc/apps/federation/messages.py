"""What a device agrees to, what it is asked in a round, and both in Flower's records; other replies are refused."""

import json
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

SERVER, DEVICE = "server", "device-{}"
"""Folders of a federation."""
HEADER = 4096
"""Bytes that an array of NumPy's may take beside its numbers."""
EARLIER = "prepared by this version of wflmc: begin a new federation elsewhere, with this one's ledger by --ledger"


Positive = Annotated[float, Field(gt=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Terms:
    """What a device has agreed to; it answers no request that goes beyond."""

    run: str
    device: Annotated[int, Field(ge=0)]
    chains: Annotated[int, Field(ge=1, le=10**7)]
    dim: Annotated[int, Field(ge=1)]
    start: Annotated[int, Field(ge=0)]
    """The number of the first round."""
    gain: tuple[Finite, ...]
    """α r_k of every round, the largest amplitude at which its gradient is to arrive; 0 where it is silent."""
    known: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    """|ĥ_k| of every round, by the device's own estimate; 1 on an ideal link. The factor covers its error."""
    clip: Positive
    """ℓ_k."""
    example_clip: Positive
    """c_k; infinite where examples are not clipped one by one."""
    rounding: Finite
    """e: clips act at ℓ/(1 + e) and c/(1 + e), see `Plan.rounding`."""
    noise_power: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """N0 of the sum."""
    share: Finite
    """Variance of the noise that the device adds itself; 0 where it relies on the channel's."""
    step: Finite
    """Its messages are multiples of this, where it adds noise."""
    factor: Finite
    """What a round costs over 2 (α r ℓ)²/N0: more where messages are seen one by one or channels are known badly."""
    power: Positive
    """P: the most that ‖x‖² may be."""
    enforced: bool
    """Whether the device keeps to its budget; a policy that ignores privacy is still written down."""
    simulated: bool
    """Whether the noise is that of a simulation, which protects nobody: answers are then repeated, but not stored."""
    promise: InstanceOf[Privacy]
    """The promise to this device."""

    @property
    def lattice(self) -> Lattice:
        """Where its messages lie, and how wide its noise is."""
        return Lattice(self.step, round(self.share**0.5 / self.step))

    @property
    def sensitivity(self) -> float:
        """Half of what a neighbouring data set can change."""
        return float(self.promise.half_change(self.clip, self.example_clip))

    def open_ledger(self, folder: Path) -> Ledger:
        """Return the device's own ledger, in its folder."""
        return Ledger(
            self.promise, 1, enforced=self.enforced, path=folder / "ledger.jsonl"
        )

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read them again."""
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
            content["promise"] = Privacy(**content["promise"])
            terms = TypeAdapter(cls).validate_python(content)
            if set(content) != set(asdict(terms)) or len(terms.gain) != len(
                terms.known
            ):
                raise ValueError("other keys, or gain and known of different lengths")
            if terms.share > 0 and not terms.step > 0:
                raise ValueError("a share of the noise, but no step")
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError("terms", str(path), f"{EARLIER} ({reason})") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("terms", str(path), f"{EARLIER} ({error})") from None
        return terms


@without_data
class RoundRequest(NamedTuple):
    """What a device is asked in a round."""

    device: int
    round: int
    theta: NDArray[np.floating]
    """Where the chains are, as the device receives it, [chain, m]."""
    gain: float
    """α r_k, the amplitude at which its gradient is to arrive."""
    known: float
    """|ĥ_k|, what it knows of its channel; a device refuses another value than its own."""
    arrives: float = 1.0
    """|h_k|, what the channel does with what it sends; the device is not told."""
    batch: NDArray[np.uint32] | None = None
    """Keys of its mini-batches, one for each chain."""

    @property
    def precoder(self) -> float:
        """α r_k/|ĥ_k|: what the clipped gradient is sent with."""
        return self.gain / self.known


@without_data
class Reception(NamedTuple):
    """What the server has received in a round."""

    total: NDArray[np.floating]
    """Σ_k h_k x_k of those who sent, [chain, m]."""
    sent: NDArray[np.bool_]
    """[K]."""
    absent: dict[int, str]
    """Why others who were asked did not send."""


class RejectedError(Exception):
    """A reply that is none to what was asked; its device counts as absent."""


def write_request(request: RoundRequest, run: str, nonce: str) -> RecordDict:
    """Return what is sent to a device."""
    content = _subject(request, run, nonce)
    content["gain"], content["known"] = request.gain, request.known
    if request.batch is not None:
        content["batch"] = [int(word) for word in request.batch.ravel()]
    return RecordDict(
        {"theta": ArrayRecord([np.ascontiguousarray(request.theta)]), "ask": content}
    )


def read_request(content: RecordDict, run: str) -> tuple[RoundRequest, str]:
    """Return what a device is asked, and the nonce to answer with; a request of another run is refused."""
    try:
        asked, (theta,) = (
            content.config_records["ask"],
            content.array_records["theta"].to_numpy_ndarrays(),
        )
        words = asked.get("batch")
        batch = (
            None
            if words is None
            else np.array(words, np.uint32).reshape(len(theta), -1)
        )
        device, number, gain, known = (
            asked[name] for name in ("device", "round", "gain", "known")
        )
        request = RoundRequest(
            int(device), int(number), theta, float(gain), float(known), batch=batch
        )
        given, nonce = asked["run"], str(asked["nonce"])
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        raise InputError(
            "request", "something else", "a request of a wflmc server"
        ) from None
    if given != run:
        raise InputError(
            "request", f"run {given}", f"run {run}, to which this device has agreed"
        )
    return request, nonce


def write_reply(
    message: Message,
    signal: NDArray[np.float32],
    request: RoundRequest,
    run: str,
    nonce: str,
) -> Message:
    """Return what a device answers to a message."""
    content = {"signal": ArrayRecord([signal]), "about": _subject(request, run, nonce)}
    return Message(RecordDict(content), reply_to=message)


def _subject(request: RoundRequest, run: str, nonce: str) -> ConfigRecord:
    """Return what says which request a message is about."""
    return ConfigRecord(
        {"run": run, "round": request.round, "device": request.device, "nonce": nonce}
    )


def read_reply(
    message: Message | None, request: RoundRequest, run: str, nonce: str, limit: float
) -> NDArray[np.float32]:
    """Return x_k[chain, m] of a reply.

    Args:
        message: as it was received; None where Flower could not put it together.
        request, run, nonce: what it must be about.
        limit: the largest norm that the device's signal can have.

    Raises:
        RejectedError: it is not exactly what was asked for.
    """
    arrays, texts = (
        ({}, {})
        if message is None
        else (message.content.array_records, message.content.config_records)
    )
    if (
        message is None
        or len(message.content) != 2
        or (list(arrays), list(texts)) != (["signal"], ["about"])
    ):
        raise RejectedError("malformed: not one array and one text record")
    subject, shape = _subject(request, run, nonce), request.theta.shape
    other = [
        name for name, value in subject.items() if texts["about"].get(name) != value
    ]
    if other:
        raise RejectedError(
            f"replayed or meant for others: {other[0]} is not the one that was asked"
        )
    size = sum(len(array.data) for array in arrays["signal"].values())
    if size > 4 * shape[0] * shape[1] + HEADER:
        raise RejectedError(f"oversized: {size} bytes for {4 * shape[0] * shape[1]}")
    try:
        (signal,) = arrays["signal"].to_numpy_ndarrays()
    except Exception as error:  # bytes from elsewhere fail in whatever way they like
        raise RejectedError(f"malformed: no array ({type(error).__name__})") from None
    if (
        not isinstance(signal, np.ndarray)
        or signal.shape != shape
        or signal.dtype != np.float32
    ):
        raise RejectedError(
            f"malformed: not float32 of shape {shape}"
        )  # NumPy reads archives, too
    norm = float(np.linalg.norm(signal.astype(float), axis=1).max())
    if not norm <= limit:
        fault = f"oversized: norm {norm:.4g} where clipping leaves at most {limit:.4g}"
        raise RejectedError(fault if np.isfinite(norm) else "not finite")
    return signal


def short(text: object) -> str:
    """Return the beginning of a text that came from elsewhere, in one line that no terminal takes for a command."""
    line = " ".join(str(text).split())[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in line)
