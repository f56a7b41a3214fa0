"""The costs of a deployment by their names, with units, and what they are computed from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Size(NamedTuple):
    """How large the deployment is."""

    devices: int
    """K."""
    parameters: int
    """m."""
    rounds: int
    """S."""
    samples: int
    """S_u, the rounds that are kept."""
    examples: float = 0.0
    """Held by a device, on average."""
    per_example: float = 6.0
    """Operations of a gradient per parameter and example: 6 in deep networks (2 forward, 4 back), 4 in linear ones."""


class Traits(NamedTuple):
    """What of a plan does not depend on its size, and is taken over to others."""

    senders: float = 1.0
    """Mean share of the devices that send in a round."""
    power: float | None = 1.0
    """Mean over devices and rounds of the share of the transmit power limit used, 0 where silent; None: ideal link."""
    power_most: float | None = 1.0
    """The same of the device that uses most."""
    received_snr: float = np.inf
    """SNR |h|² of the weakest sender, the median round; infinite on an ideal link."""
    budget: float = np.inf
    """R, the smallest loss that a device is promised."""
    reach: float = 1.0
    """min(c, ℓ)/ℓ: what one example can change of a device's gradient; 1 at device level."""
    loss_bytes: float = 21.6
    """Of a device's loss of a round in the ledger, as text; 0 where none is kept."""
    kinetic: bool = False
    """Whether a velocity is carried."""
    server_noise: bool = False
    """Whether the server draws noise of its own."""
    noisy_broadcast: bool = False
    """Whether θ is broadcast as it is, over a noisy downlink; else as bits."""


class Radio(NamedTuple):
    """What the air offers."""

    bandwidth: float = 20e6
    """Hz left for data after pilots and guards; as many complex symbols a second."""
    power: float = 0.2
    """Watts that a device radiates at its power limit: the P of SNR = P/(m N0), while a round lasts."""
    efficiency: float = 1.0
    """bit/s/Hz of digital links: the broadcast, and the uplink of a digital transport."""
    coherence: float = 0.01
    """Seconds in which channels stay as they are."""


class Machine(NamedTuple):
    """Speeds of one core, in processor seconds, as `python -m benchmarks.capacity` measures them; and sizes."""

    bytes_rate: float = 4e9
    """Bytes a second that an update reads and writes."""
    normal_rate: float = 5e7
    """Normal numbers drawn a second."""
    operations_rate: float = 2.5e10
    """Operations a second of gradients in an emulation."""
    pair_seconds: float = 5e-7
    """Of planning, per round and device."""
    pair_bytes: float = 100.0
    """Of planning at its peak, per round and device."""
    entry_seconds: float = 2.5e-6
    """Of the ledger, per loss written."""
    memory: float = 64e9
    """Bytes of the server; assumed."""
    disk: float = 1e12
    """Bytes of the server; assumed."""
    device_rate: float = 1e10
    """Operations a second of a device; assumed."""


class Air(NamedTuple):
    """Time on the air. Two real symbols, I and Q, go into one complex one."""

    channel_uses: int
    """Real symbols of a round, m, whatever the number of devices."""
    channel_uses_in_all: int
    """The same of all rounds."""
    uplink_seconds: float
    """Of a round."""
    downlink_seconds: float
    """Of a round: θ broadcast once to all, 32 bits a parameter; as symbols where the downlink is a noisy one."""
    seconds_in_all: float
    """Both ways, all rounds."""
    blocks: int
    """Coherence times that the uplink of a round takes."""


class Energy(NamedTuple):
    """Radiated energy in joules, at most: gradients of full length ℓ. None on an ideal link."""

    device_round: float | None
    """Of a device in a round, on average."""
    device: float | None
    """Of a device in all rounds, on average."""
    device_most: float | None
    """Of the device that uses most."""
    all_devices: float | None
    """Of all devices in all rounds."""


class Work(NamedTuple):
    """Operations, memory and time of a server or a device."""

    operations: float
    """Of a round."""
    bytes: float
    """Of memory at the peak of a round, data and compiled program aside."""
    seconds: float
    """Of a round."""


class Digital(NamedTuple):
    """The same rounds with every sender's gradient sent by itself, 32 bits a parameter, one after the other."""

    uplink_bytes: float
    """Of a round."""
    uplink_seconds: float
    """Of a round."""
    times: float
    """Over the uplink's seconds over the air."""


class Files(NamedTuple):
    """What is kept, in bytes."""

    samples: float
    """trace.nc of one chain: θ of the kept rounds, and what is known of each."""
    ledger: float
    """ledger.jsonl: a loss for every device and round, as text."""
    ledger_memory: float
    """At the peak of reading the ledger."""
    ledger_seconds: float
    """To write a round of it."""


class Planning(NamedTuple):
    """Making the plan."""

    pairs: int
    """Rounds × devices."""
    seconds: float
    """In all."""
    bytes: float
    """At the peak."""


class Time(NamedTuple):
    """Seconds of a round, whose parts come one after the other, and of all rounds."""

    broadcast: float
    gradient: float
    uplink: float
    server: float
    """The update, and the ledger's lines."""
    in_all: float

    @property
    def longest(self) -> str:
        """The part that takes longest."""
        return max(("broadcast", "gradient", "uplink", "server"), key=lambda part: getattr(self, part))


class Limit(NamedTuple):
    """Something that is needed and what there is of it, in one unit."""

    name: str
    needs: float
    has: float
    unit: str
    remedy: str

    @property
    def ratio(self) -> float:
        """Above 1 it breaks."""
        return self.needs / self.has


class Capacity(NamedTuple):
    """What a deployment of a size costs."""

    size: Size
    air: Air
    energy: Energy
    server: Work
    device: Work
    digital: Digital
    files: Files
    planning: Planning
    emulation: Work
    """All devices and the channel of one chain on one machine."""
    time: Time
    limits: tuple[Limit, ...]
    """What is nearest to breaking, first."""
