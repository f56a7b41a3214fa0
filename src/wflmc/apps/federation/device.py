"""A device: it computes, clips and precodes its gradient, and pays for what it sends.

A device has its own data, its own terms and its own ledger, and trusts no server:

- a request that goes beyond the terms is refused (`Device.answer`);
- its ledger is charged before the signal leaves the device;
- on Flower, an error tells the server nothing about the data (`client_app`).
"""

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

MAX_MAGNITUDE = 1e9
"""The largest parameter that a device answers for, and the largest number in its data:
float32 then holds the gradients of linear and softmax models, whatever the data."""
REQUEST_TOLERANCE = 1e-6
"""The relative rounding error that a device accepts in a request."""
MEMORY_FRACTION = 1 / 4
"""Of the default memory limit, for one of several devices on a machine."""
MAX_OPEN_DEVICES = 1024
"""How many devices one process keeps open, with their compiled gradients."""

FAILED = "the device could not answer; its own log says why"
"""What a server receives for an error that may be about the data."""
NOT_READY = (
    "data or other files in the device's folder cannot be used; its own log says why"
)
"""What a server receives where a device cannot be opened."""
ANSWER_ALLOWED = "as wflmc wrote it, or removed: the next is new"
"""What is allowed in place of a damaged answer.npz."""


@without_data
class Answer(NamedTuple):
    """The last answer of a device, as its file answer.npz has it."""

    request: str
    """The name of the request."""
    charge: str
    """The name under which the ledger has it; each new draw of noise has its own."""
    signal: NDArray[np.float32]
    """x, [chain, m]."""


class _ClippingThresholds(NamedTuple):
    """Where float32 clips, so that no rounding exceeds the agreed thresholds."""

    device: NDArray[np.float32]
    """ℓ/(1 + e), [1]."""
    example: NDArray[np.float32]
    """c/(1 + e), [1]."""


class Device:
    """One device, which answers the requests that its terms allow.

    Args:
        posterior: of this device alone, such as `posterior.device(k)`.
        terms: what it has agreed to.
        ledger: its own, for one device; charged before it answers. Losses are counted
            for every signal that has left the device, received or not, so that it may
            show more than the server's. The last answer is stored beside its file.
        secret: salts the names of requests in files; known to nobody else.

    Raises:
        InputError: the model does not fit the terms, or the data are too large.
    """

    def __init__(
        self,
        posterior: Posterior,
        terms: Terms,
        ledger: Ledger | None = None,
        secret: bytes = b"",
    ) -> None:
        if posterior.dim != terms.dim:
            model = f"a model of {posterior.dim} parameters"
            raise InputError("data", model, f"one of {terms.dim}, as in the terms")
        _check_magnitude(posterior)
        self.terms = terms
        self.ledger = ledger
        self.secret = secret
        self._answer_path: Path | None = None
        if ledger is not None and ledger.path is not None:
            self._answer_path = ledger.path.with_name("answer.npz")
        self._last_answer: Answer | None = None
        self._data_digest = posterior.digest
        self._by_example = bool(np.isfinite(terms.example_clip))
        self._thresholds = _clipping_thresholds(posterior, terms)
        self._posterior = posterior.on_accelerator(
            terms.chains, default_memory() * MEMORY_FRACTION, self._by_example
        )

    def answer(self, request: RoundRequest) -> NDArray[np.float32]:
        """Compute the signal of a round: x = (α r/|ĥ|) clip(g), plus noise if agreed.

        The ledger is charged before the signal is returned, and so before it is sent. A
        signal is stored before it is charged: if the same request is repeated, it gets
        the same numbers, at no cost, even if the device was stopped in between. Only
        the last answer is stored: any other request, also an earlier one, is a new
        draw, which costs. Where the channel adds the noise, a round that was answered
        is refused instead. Under simulated noise, which protects nobody, nothing is
        stored and the same request is computed again.

        Args:
            request: of the server, checked against the terms.

        Returns:
            x of every chain, [chain, m].

        Raises:
            InputError: the request goes beyond the terms, the same noise would hide
                another answer, or the stored answer or the ledger is damaged.
            OverspendError: the budget does not suffice.
        """
        self._check(request)
        request_name = self._request_name(request)
        if self.terms.simulated:
            self._charge(request, request_name)
            return self._draw(request)
        with self._locked_answer():
            previous = self._load_answer()
            answer = previous
            if answer is None or answer.request != request_name:
                signal = self._draw(request)
                answer = Answer(request_name, secrets.token_hex(16), signal)
                self._save_answer(answer)
            # Charge before send: nothing leaves the device that has not been paid for.
            try:
                self._charge(request, answer.charge)
            except (InputError, OverspendError):
                # A refused request must not replace an answer that was paid for.
                if previous is not None:
                    self._save_answer(previous)
                raise
        return answer.signal

    def _charge(self, request: RoundRequest, name: str) -> None:
        """Charge an answer, by what arrives of it as far as the device knows.

        Where the channel adds the noise, the ledger has a name for it, and refuses
        another answer in the same round: its noise may be the same again. Noise of the
        device itself is new in every answer, and has no name.
        """
        if self.ledger is None:
            return
        terms = self.terms
        amplitude = self._precoder(request) * self._channel_estimate(request)
        round_cost = round_loss(
            np.array([amplitude]),
            np.ones((1, 1)),
            np.array([terms.sensitivity]),
            terms.noise_power,
        )
        try:
            self.ledger.charge(
                run=name,
                first=request.round,
                losses=terms.factor * round_cost,
                noise="" if terms.share else terms.run,
            )
        except InputError as error:
            # The ledger speaks of a seed; here a server asks for a second answer.
            if error.key != "seed":
                raise
            raise InputError(
                "request",
                f"another one for round {request.round + 1}",
                "a repetition of the last one that was answered: two answers under the "
                "same noise would reveal their difference",
            ) from None

    def _locked_answer(self) -> AbstractContextManager[None]:
        """Lock the file of the last answer, where there is one."""
        if self._answer_path is None:
            return nullcontext()
        return exclusive(self._answer_path.with_suffix(".lock"))

    def _load_answer(self) -> Answer | None:
        """Return the last answer, from its file where there is one."""
        path = self._answer_path
        if path is None or not path.exists():
            return self._last_answer
        arrays = read_arrays(
            path, key="answer", requirement=ANSWER_ALLOWED, names=Answer._fields
        )
        damaged = InputError("answer", str(path), ANSWER_ALLOWED)
        if len(arrays) != len(Answer._fields):
            raise damaged
        signal = arrays["signal"]
        shape = (self.terms.chains, self.terms.dim)
        if signal.shape != shape or signal.dtype != np.float32:
            raise damaged
        return Answer(str(arrays["request"]), str(arrays["charge"]), signal)

    def _save_answer(self, answer: Answer) -> None:
        """Replace the last answer; it is on the disk when this returns."""
        self._last_answer = answer
        if self._answer_path is not None:
            with replacing(self._answer_path, mode=0o600) as file:
                np.savez(file, allow_pickle=False, **answer._asdict())

    def _draw(self, request: RoundRequest) -> NDArray[np.float32]:
        """Compute a new signal, with new noise where the device adds it."""
        keys = None
        if request.batch is not None:
            keys = jax.random.wrap_key_data(jnp.asarray(request.batch))
        gradient = _gradient(
            self._posterior,
            jnp.asarray(request.theta),
            self._thresholds.device,
            self._thresholds.example if self._by_example else None,
            keys,
        ).double
        # Whether a gradient is finite is private, and nothing would hide a refusal. Zero
        # is within ℓ. It is not within c of another sum, but records that are clipped
        # one by one cannot make a sum that is not finite (Sums, step 8).
        finite_gradient = np.where(np.isfinite(gradient), gradient, 0.0)
        signal = self._precoder(request) * finite_gradient
        if self.terms.share:
            signal = self.terms.lattice.noisy(signal)
        return signal.astype(np.float32)

    def _round_index(self, request: RoundRequest) -> int:
        """Return which round of the terms is requested, from 0."""
        return request.round - self.terms.start

    def _channel_estimate(self, request: RoundRequest) -> float:
        """Return |ĥ|, by what the device itself knows of its channel."""
        return self.terms.known[self._round_index(request)]

    def _precoder(self, request: RoundRequest) -> float:
        """Return α r/|ĥ|, by what the device itself knows of its channel."""
        return request.gain / self._channel_estimate(request)

    def _check(self, request: RoundRequest) -> None:
        """Refuse a request that goes beyond the terms."""
        terms = self.terms
        round_index = self._round_index(request)
        in_terms = 0 <= round_index < len(terms.gain)
        if request.device != terms.device or not in_terms:
            subject = f"device {request.device}, round {request.round + 1}"
            raise InputError("request", subject, "one that is in the terms")
        self._check_theta(request.theta)
        estimate = terms.known[round_index]
        if not abs(request.channel_estimate / estimate - 1) <= REQUEST_TOLERANCE:
            expected = f"{estimate:.6g}, what the device itself knows of its channel"
            raise InputError("known", request.channel_estimate, expected)
        max_gain = terms.gain[round_index]
        if not 0 < request.gain <= max_gain * (1 + REQUEST_TOLERANCE):
            expected = f"above 0 and at most {max_gain:.6g}, as agreed for this round"
            raise InputError("gain", request.gain, expected)
        if terms.power < np.inf:
            power = (self._precoder(request) * terms.clip) ** 2
            if power > terms.power * (1 + REQUEST_TOLERANCE):
                expected = "within the transmit power of the device"
                raise InputError("gain", request.gain, expected)

    def _check_theta(self, theta: NDArray[np.floating]) -> None:
        """Refuse positions of another shape, and those at which gradients overflow.

        Whether a gradient overflows depends on the data, and so is private.
        """
        chains = self.terms.chains
        dim = self.terms.dim
        if theta.shape != (chains, dim) or theta.dtype != np.float32:
            expected = f"float32 [{chains} chains, {dim} parameters]"
            raise InputError("theta", theta, expected)
        if not np.all(np.abs(theta) <= MAX_MAGNITUDE):
            expected = f"at most {MAX_MAGNITUDE:g} everywhere"
            raise InputError("theta", "nan, infinite or too large", expected)

    def _request_name(self, request: RoundRequest) -> str:
        """Return a name for a request to this device with these data.

        With other data the same request has another name: its answer has other noise,
        and costs again.
        """
        run = self.terms.run.encode()
        data_digest = self._data_digest.encode()
        numbers = np.array([request.round, request.gain, request.channel_estimate])
        batch_keys = () if request.batch is None else (request.batch,)
        return digest(
            self.secret, run, data_digest, request.theta, numbers, *batch_keys
        )


def _check_magnitude(posterior: Posterior) -> None:
    """Refuse data with numbers so large that gradients might overflow."""
    arrays = []
    if isinstance(posterior, Regression):
        arrays.append(posterior.features)
    if isinstance(posterior, GaussianPosterior):
        arrays.append(posterior.target)
    if any(np.any(np.abs(array) > MAX_MAGNITUDE) for array in arrays):
        numbers = f"numbers above {MAX_MAGNITUDE:g}"
        raise InputError("data", numbers, "scaled to moderate size")


def _clipping_thresholds(posterior: Posterior, terms: Terms) -> _ClippingThresholds:
    """Return the thresholds of the terms, divided by 1 + e of the rounding errors.

    The e is the larger of that in the terms, and that of this device's own data. It is
    relative to the change that is hidden, as in `Plan.rounding`: where neighbours
    differ by less than 2 min(c, ℓ), what rounding adds is a larger part of it.
    """
    clip = np.array([terms.clip])
    example_clip = np.array([terms.example_clip])
    ratio = 0.0
    if np.isfinite(terms.sensitivity):
        ratio = min(terms.clip, terms.example_clip) / terms.sensitivity
    own_rounding = posterior.rounding(clip, example_clip).total * ratio
    divisor = 1 + max(terms.rounding, own_rounding)
    return _ClippingThresholds(
        device=(clip / divisor).astype(np.float32),
        example=(example_clip / divisor).astype(np.float32),
    )


@jax.jit
def _gradient(
    posterior: Posterior,
    theta: jax.Array,
    clip: jax.Array,
    example_clip: jax.Array | None,
    keys: jax.Array | None,
) -> Sum:
    """Return the clipped gradient of every chain at theta[chain, m], not rounded."""
    weight = jnp.ones(1, theta.dtype)

    def chain_gradient(theta: jax.Array, key: jax.Array | None) -> Sum:
        clipped = posterior.unrounded_sum(
            theta, weight, clip, key=key, example_clip=example_clip
        )
        return clipped.total

    key_axis = None if keys is None else 0
    return jax.vmap(chain_gradient, (0, key_axis))(theta, keys)


class ModelKeys(Document):
    """`model` of model.json: arguments of the model's function."""

    intercept: bool
    prior_std: float
    prior_mean: list[float] | None = None
    """θ₀[m], which is public; None: zero."""
    classes: list[int] | list[str] | None = None
    """The labels of all devices, declared; None for a regression."""


class ModelFile(Document):
    """model.json: which model a device computes."""

    model: ModelKeys
    whitening: list[list[float]] | None
    """The matrix that maps features to the coordinates of the chains."""
    prior_on: str


@lru_cache(maxsize=MAX_OPEN_DEVICES)
def open_device(folder: Path, posterior: Posterior | None = None) -> Device:
    """Open the device of a folder, as `write_federation` left it.

    In the same process the same arguments return the same device, so that its gradient
    is compiled once; files that change later are not read again. Its secret salts the
    names of requests in files, so that nobody can test guesses of its data against
    them. Without clipping its sensitivity is infinite: nothing is promised then, and it
    has no ledger.

    Args:
        folder: of the device.
        posterior: the device's part of a custom model, which no folder can hold; None
            reads a regression from the folder.

    Returns:
        The device, which answers requests of its run.

    Raises:
        InputError: a file is missing or damaged, or the data do not fit the model.
    """
    terms = Terms.load(folder / "terms.json")
    device_posterior = read_posterior(folder) if posterior is None else posterior
    try:
        secret = (folder / "secret").read_bytes()
    except OSError as error:
        expected = f"the folder of a device, with its secret ({error.strerror})"
        raise InputError("device", str(folder), expected) from None
    ledger = terms.open_ledger(folder) if np.isfinite(terms.sensitivity) else None
    return Device(device_posterior, terms, ledger, secret)


def read_posterior(folder: Path) -> Regression:
    """Read a device's part of a regression, from its model.json and its own data.npz.

    The classes are those that model.json declares. Every row is therefore read by
    itself, whatever the other rows contain.

    Args:
        folder: of the device.

    Returns:
        The posterior of this device alone, in the coordinates of the chains.

    Raises:
        InputError: a file is missing or damaged, or the data do not fit the model.
    """
    document = read_document(folder / "model.json", ModelFile, "device")
    data = _read_data(folder / "data.npz")
    key = jax.random.key(0)
    model = document.model
    posterior: Regression
    if model.classes is None:
        posterior = gaussian_regression(
            key,
            1,
            X=data.X,
            y=data.y,
            intercept=model.intercept,
            prior_std=model.prior_std,
            prior_mean=model.prior_mean,
        )
    else:
        posterior = softmax_regression(
            key,
            1,
            X=data.X,
            y=data.y,
            classes=model.classes,
            intercept=model.intercept,
            prior_std=model.prior_std,
            prior_mean=model.prior_mean,
        )
    if document.whitening is None:
        return posterior
    try:
        matrix = np.array(document.whitening)
        whitened = posterior.whitened(matrix, document.prior_on)
    except ValueError:
        expected = "whitening for as many features as X has"
        path = str(folder / "model.json")
        raise InputError("device", path, expected) from None
    # With subjects of their own, all devices would be compiled separately.
    return replace(whitened, subject="")


def _read_data(path: Path) -> Features:
    """Return the X and y of a device's own file."""
    expected = "the file of a device's own data, with X and y"
    arrays = read_arrays(path, key="device", requirement=expected, names=("X", "y"))
    if len(arrays) < 2:
        raise InputError("device", str(path), expected)
    data = Features(X=arrays["X"], y=arrays["y"])
    check_shapes(data, "device")
    return data


def client_app(find: Callable[[Context], Device]) -> ClientApp:
    """Make the Flower app of devices, which answers two kinds of messages.

    "query.hello" asks whether a device can use its data, and costs nothing;
    "query.gradient" has the request of a round. Flower sends the text of whatever a
    device raises to the server. Here that is one fixed sentence, unless a request was
    refused (InputError, OverspendError): these texts are about the request, the terms,
    the ledger and the paths of the device's files. Details go to the device's own log.

    Args:
        find: returns the device of a context, such as by its node_config; called for
            every message, so that it should remember.

    Returns:
        The app, for a SuperNode or Flower's simulation engine.
    """
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        """Reply with the number of a device that can use its data.

        No round is requested, so that nothing is charged. Where the device cannot be
        opened, the server receives only that it is not ready.

        Args:
            message: of the server; its content is not read.
            context: of the SuperNode.

        Returns:
            The reply to the message.
        """
        with _without_details(reason=NOT_READY):
            device = find(context)
        content = {"about": ConfigRecord({"device": device.terms.device})}
        return Message(RecordDict(content), reply_to=message)

    @app.query("gradient")
    def gradient(message: Message, context: Context) -> Message:
        """Reply with the signal of a round, which is charged before it is sent.

        A request that goes beyond the terms or the budget is refused, and the server
        receives the reason. Any other error is described in the device's own log alone.

        Args:
            message: with the request.
            context: of the SuperNode.

        Returns:
            The reply to the message.
        """
        with _without_details(reason=NOT_READY):
            device = find(context)
        with _without_details(InputError, OverspendError):
            run = device.terms.run
            request, nonce = read_request(message.content, run)
            signal = device.answer(request)
            return write_reply(message, signal, request=request, run=run, nonce=nonce)

    return app


@contextmanager
def _without_details(*shown: type[Exception], reason: str = FAILED) -> Iterator[None]:
    """Keep all that comes from the data from the server, if something is raised.

    Args:
        shown: errors whose text contains nothing of the data.
        reason: what the server receives for any other error.
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
    """Open the device whose folder the SuperNode was started with.

    The SuperNode's option --node-config names it, `folder='PATH'`; a relative path
    starts where the SuperNode was started.

    Args:
        context: of the SuperNode.

    Returns:
        The device, the same for every message.

    Raises:
        InputError: no folder was named, or its files cannot be used.
    """
    folder = context.node_config.get("folder")
    if not isinstance(folder, str) or not folder:
        expected = "folder='PATH' with the folder of this device"
        raise InputError("node-config", folder, expected)
    return open_device(Path(folder))


def devices_in(folder: Path) -> ClientApp:
    """Make the app of devices whose folders lie side by side.

    This is for Flower's simulation engine, which numbers the devices by the
    `partition-id` of their contexts: device k has the folder device-k.

    Args:
        folder: of the federation.

    Returns:
        One app for all devices.
    """

    def find(context: Context) -> Device:
        number = context.node_config["partition-id"]
        return open_device(folder / DEVICE.format(number))

    return client_app(find)


app = client_app(configured_device)
"""The app of a device on a machine of its own."""
