"""A device: its own data, its own terms and its own ledger; computes, clips and precodes its gradient.

On Flower it is an app, which keeps all that comes from the data from a server whose request fails.
"""

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from wflmc.apps.federation.messages import (
    DEVICE,
    RoundRequest,
    Terms,
    read_request,
    write_reply,
)
from wflmc.data.sets import Features, check_shapes
from wflmc.posterior import (
    GaussianPosterior,
    Posterior,
    Regression,
    gaussian_regression,
    softmax_regression,
)
from wflmc.privacy import Ledger, round_loss
from wflmc.runs.documents import Document, read_document
from wflmc.sampling import default_memory
from wflmc.sums.devices import Sum
from wflmc.support.errors import InputError, OverspendError, without_data
from wflmc.support.keys import digest
from wflmc.support.storage import exclusive, read_arrays, replacing

log = logging.getLogger("wflmc.apps.federation")

LARGEST = 1e9
"""The largest parameter that a device answers for, and the largest number that its data may have: float32 holds the
gradients of linear and softmax models then, whatever the data."""
SLACK = 1e-6
"""Relative rounding that a device forgives a request."""


FAILED = "the device could not answer; its own log says why"
NOT_READY = (
    "data or other files in the device's folder cannot be used; its own log says why"
)
"""What a server is told, which must not learn more about the data."""


@without_data
class Answer(NamedTuple):
    """What a device has been asked and has answered."""

    request: str
    """A name for what was asked."""
    charge: str
    """Under which name the ledger has it; every answer that is drawn anew has one of its own."""
    signal: NDArray[np.float32]
    """x, [chain, m]."""


class Device:
    """One device, which answers what its terms allow.

    Args:
        posterior: of this device alone, such as `posterior.device(k)`.
        terms: what it has agreed to.
        ledger: its own, for one device; charged before it answers. Losses are counted for whatever has left the device,
            received or not, so that it may show more than the server's. The last answer is stored beside its file.
        secret: salts the names that files have for what was asked, known to nobody else.
    """

    def __init__(
        self,
        posterior: Posterior,
        terms: Terms,
        ledger: Ledger | None = None,
        secret: bytes = b"",
    ) -> None:
        if posterior.dim != terms.dim:
            raise InputError(
                "data",
                f"a model of {posterior.dim} parameters",
                f"one of {terms.dim}, as in the terms",
            )
        large = isinstance(posterior, Regression) and np.any(
            np.abs(posterior.features) > LARGEST
        )
        if large or (
            isinstance(posterior, GaussianPosterior)
            and np.any(np.abs(posterior.target) > LARGEST)
        ):
            raise InputError(
                "data", f"numbers above {LARGEST:g}", "scaled to moderate size"
            )
        self.terms, self.ledger, self.secret = terms, ledger, secret
        self._path = (
            None
            if ledger is None or ledger.path is None
            else ledger.path.with_name("answer.npz")
        )
        self._last: Answer | None = None
        self._data = posterior.digest
        self._by_example = bool(np.isfinite(terms.example_clip))
        clips = np.array([terms.clip]), np.array([terms.example_clip])
        shrink = (
            min(terms.clip, terms.example_clip) / terms.sensitivity
            if np.isfinite(terms.sensitivity)
            else 0.0
        )
        rounding = max(terms.rounding, posterior.rounding(*clips).total * shrink)
        self._clip, self._example_clip = (
            np.float32(clip / (1 + rounding)) for clip in clips
        )
        self._posterior = posterior.on_accelerator(
            terms.chains, default_memory() / 4, self._by_example
        )

    def answer(self, request: RoundRequest) -> NDArray[np.float32]:
        """Return x = (α r/|ĥ|) clip(g) of every chain, with its share of the noise where it adds one, [chain, m].

        An answer is stored before it is paid for and sent: the same request again is answered with the same numbers,
        and costs nothing. Any other is a new draw, which costs.
        """
        self._check(request)
        name = self._name(request)
        if self.terms.simulated:
            self._pay(request, name)
            return self._draw(request)
        with (
            nullcontext()
            if self._path is None
            else exclusive(self._path.with_suffix(".lock"))
        ):
            answer = before = self._load()
            if answer is None or answer.request != name:
                answer = Answer(name, secrets.token_hex(16), self._draw(request))
                self._save(answer)
            try:
                self._pay(request, answer.charge)
            except (InputError, OverspendError):
                if (
                    before is not None
                ):  # a request that is refused does not take the place of an answer that was paid
                    self._save(before)
                raise
        return answer.signal

    def _load(self) -> Answer | None:
        """Return the last answer, from the file that only its owner reads where there is one."""
        if self._path is None or not self._path.exists():
            return self._last
        allowed = "as wflmc wrote it, or removed: the next is new"
        saved = read_arrays(
            self._path, key="answer", allowed=allowed, names=Answer._fields
        )
        shape = (self.terms.chains, self.terms.dim)
        signal = saved.get("signal")
        whole = len(saved) == len(Answer._fields) and signal is not None
        if (
            signal is None
            or not whole
            or signal.shape != shape
            or signal.dtype != np.float32
        ):
            raise InputError("answer", str(self._path), allowed)
        return Answer(str(saved["request"]), str(saved["charge"]), signal)

    def _save(self, answer: Answer) -> None:
        """Put an answer in the place of the one before; it is on the disk before it is sent."""
        self._last = answer
        if self._path is not None:
            with replacing(self._path, mode=0o600) as file:
                np.savez(file, allow_pickle=False, **answer._asdict())

    def _draw(self, request: RoundRequest) -> NDArray[np.float32]:
        """Compute a new answer."""
        limit = self._example_clip if self._by_example else None
        keys = (
            None
            if request.batch is None
            else jax.random.wrap_key_data(jnp.asarray(request.batch))
        )
        gradient = _gradient(
            self._posterior, jnp.asarray(request.theta), self._clip, limit, keys
        ).double
        # That a gradient is not finite must not show; zero is within the clip.
        signal = self._precoder(request) * np.where(
            np.isfinite(gradient), gradient, 0.0
        )
        return (
            self.terms.lattice.noisy(signal) if self.terms.share else signal
        ).astype(np.float32)

    def _precoder(self, request: RoundRequest) -> float:
        """Return α r/|ĥ|, by what the device itself knows of its channel."""
        return request.gain / self.terms.known[request.round - self.terms.start]

    def _check(self, request: RoundRequest) -> None:
        """Refuse a request that goes beyond the terms."""
        terms, theta, at = self.terms, request.theta, request.round - self.terms.start
        if request.device != terms.device or not 0 <= at < len(terms.gain):
            raise InputError(
                "request",
                f"device {request.device}, round {request.round}",
                "one that is in the terms",
            )
        if theta.shape != (terms.chains, terms.dim) or theta.dtype != np.float32:
            raise InputError(
                "theta",
                theta,
                f"float32 [{terms.chains} chains, {terms.dim} parameters]",
            )
        if not np.all(
            np.abs(theta) <= LARGEST
        ):  # gradients might overflow, and whether they do is private
            raise InputError(
                "theta", "nan, infinite or too large", f"at most {LARGEST:g} everywhere"
            )
        known, gain = terms.known[at], terms.gain[at]
        if not abs(request.known / known - 1) <= SLACK:
            raise InputError(
                "known",
                request.known,
                f"{known:.6g}, what the device itself knows of its channel",
            )
        if not 0 < request.gain <= gain * (1 + SLACK):
            raise InputError(
                "gain",
                request.gain,
                f"above 0 and at most {gain:.6g}, as agreed for this round",
            )
        if terms.power < np.inf and (
            self._precoder(request) * terms.clip
        ) ** 2 > terms.power * (1 + SLACK):
            raise InputError(
                "gain", request.gain, "within the transmit power of the device"
            )

    def _pay(self, request: RoundRequest, name: str) -> None:
        """Charge an answer, by what is sent and by what the device knows of its channel.

        Another one for the same round is refused where the server draws the noise, which may be the same again.
        """
        if self.ledger is None:
            return
        arrives = (
            self._precoder(request) * self.terms.known[request.round - self.terms.start]
        )
        gain, sensitivity = np.array([arrives]), np.array([self.terms.sensitivity])
        loss = self.terms.factor * round_loss(
            gain, np.ones((1, 1)), sensitivity, self.terms.noise_power
        )
        self.ledger.charge(
            name, request.round, loss, "" if self.terms.share else self.terms.run
        )

    def _name(self, request: RoundRequest) -> str:
        """Return a name for a request to this device: other data give another, with other noise, that costs again."""
        keys = () if request.batch is None else (request.batch,)
        about = np.array([request.round, request.gain, request.known])
        return digest(
            self.secret,
            self.terms.run.encode(),
            self._data.encode(),
            request.theta,
            about,
            *keys,
        )


@jax.jit
def _gradient(
    posterior: Posterior,
    theta: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array | None,
    keys: jax.Array | None,
) -> Sum:
    """Return the clipped gradient of every chain at theta[chain, m], before it is rounded."""
    one = jnp.ones(1, theta.dtype)

    def chain(theta: jax.Array, key: jax.Array | None) -> Sum:
        return posterior.unrounded_sum(
            theta, one, clip, key=key, example_clip=example_clip
        ).total

    return jax.vmap(chain, (0, None if keys is None else 0))(theta, keys)


class ModelKeys(Document):
    """`model` of model.json: arguments of the model's function."""

    intercept: bool
    prior_std: float
    classes: list[int] | list[str] | None = None
    """The labels of all devices, declared; None for a regression."""


class ModelFile(Document):
    """model.json: which model a device computes."""

    model: ModelKeys
    whitening: list[list[float]] | None
    prior_on: str


@lru_cache(maxsize=1024)
def open_device(folder: Path, posterior: Posterior | None = None) -> Device:
    """Return the device of a folder, as `write_federation` left it; the same one again in the same process.

    Args:
        folder: of the device.
        posterior: the device's part of a model of one's own, which no folder can hold.
    """
    terms = Terms.load(folder / "terms.json")
    part = read_posterior(folder) if posterior is None else posterior
    try:
        secret = (folder / "secret").read_bytes()
    except OSError as error:
        raise InputError(
            "device",
            str(folder),
            f"the folder of a device, with its secret ({error.strerror})",
        ) from None
    ledger = terms.open_ledger(folder) if np.isfinite(terms.sensitivity) else None
    return Device(part, terms, ledger, secret)


def read_posterior(folder: Path) -> Regression:
    """Return a device's part of a regression, from its model.json and its own data.npz.

    The classes are those that model.json declares. So every row is read by itself,
    whatever the other rows say.

    Args:
        folder: of the device.

    Raises:
        InputError: a file is missing or damaged, or the data do not fit the model.
    """
    about = read_document(folder / "model.json", ModelFile, "device")
    allowed = "the file of a device's own data, with X and y"
    data = read_arrays(
        folder / "data.npz", key="device", allowed=allowed, names=("X", "y")
    )
    if len(data) < 2:
        raise InputError("device", str(folder / "data.npz"), allowed)
    check_shapes(Features(**data), "device")
    key = jax.random.key(0)
    model = about.model
    posterior: Regression
    if model.classes is None:
        posterior = gaussian_regression(
            key,
            1,
            X=data["X"],
            y=data["y"],
            intercept=model.intercept,
            prior_std=model.prior_std,
        )
    else:
        posterior = softmax_regression(
            key,
            1,
            X=data["X"],
            y=data["y"],
            classes=model.classes,
            intercept=model.intercept,
            prior_std=model.prior_std,
        )
    if about.whitening is None:
        return posterior
    try:
        matrix = np.array(about.whitening)
        whitened = posterior.whitened(matrix, about.prior_on)
    except ValueError:
        raise InputError(
            "device",
            str(folder / "model.json"),
            "whitening for as many features as X has",
        ) from None
    return replace(whitened, subject="")  # else every device would be compiled anew


def client_app(find: Callable[[Context], Device]) -> ClientApp:
    """Return the app of the devices.

    Args:
        find: the device of a context, such as by its node_config; called for every message, so it should remember.
    """
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        with _without_details(reason=NOT_READY):
            device = find(context)
        return Message(
            RecordDict({"about": ConfigRecord({"device": device.terms.device})}),
            reply_to=message,
        )

    @app.query("gradient")
    def gradient(message: Message, context: Context) -> Message:
        with _without_details(reason=NOT_READY):
            device = find(context)
        with _without_details(InputError, OverspendError):
            request, nonce = read_request(message.content, device.terms.run)
            return write_reply(
                message, device.answer(request), request, device.terms.run, nonce
            )

    return app


@contextmanager
def _without_details(*shown: type[Exception], reason: str = FAILED) -> Iterator[None]:
    """Keep from the server, which Flower tells the text of whatever a device raises, all that comes from the data.

    Args:
        shown: errors whose sentence is about the request alone.
        reason: what the server is told of any other error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, shown):
            log.warning("Request refused: %s", error)
            raise PermissionError(f"refused by the device: {error}") from None
        log.exception("The device could not answer.")
        raise RuntimeError(reason) from None


def configured_device(context: Context) -> Device:
    """Return the device whose folder the SuperNode was given."""
    folder = context.node_config.get("folder")
    if not isinstance(folder, str) or not folder:
        raise InputError(
            "node-config", folder, "folder='PATH' with the folder of this device"
        )
    return open_device(Path(folder))


def devices_in(folder: Path) -> ClientApp:
    """Return the app of devices whose folders lie side by side, each named by its number."""
    return client_app(
        lambda context: open_device(
            folder / DEVICE.format(context.node_config["partition-id"])
        )
    )


app = client_app(configured_device)
"""Of a machine of its own; the SuperNode's --node-config names the device's folder, `folder='…'`."""
