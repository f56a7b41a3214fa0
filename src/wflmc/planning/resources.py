"""What a plan takes from the air: channel uses and transmit energy.

`docs/guides/scale.md` turns them into airtime and joules, and has the formulas by which
both grow with devices, parameters and rounds.
"""

import numpy as np

from wflmc.channel import Link
from wflmc.dynamics import Array
from wflmc.planning.plan import Plan


def channel_uses(plan: Plan) -> int:
    """Return the real channel uses of the uplink, in all rounds: S·m.

    All devices transmit at once, so that the number of devices does not matter. One
    complex symbol, I and Q, is two of these uses.

    Args:
        plan: of S rounds and m parameters.
    """
    return len(plan.rounds) * plan.dim


def transmit_energy(plan: Plan, link: Link) -> Array | None:
    """Return the most energy that every device transmits in all rounds.

    A device that sends a gradient of norm ℓ_k with the precoder α (w_k K_a/K)/|ĥ_k|
    puts the energy α² (w_k K_a/K)² ℓ_k²/|ĥ_k|² on the m channel uses of a round; its
    limit is P_k = m SNR_k N0. Gradients shorter than the clip take less.

    Args:
        plan: of K devices.
        link: the channels that it was made for.

    Returns:
        [K], in units of P_k/m, the limit of one channel use: a device that always
        transmits at its limit takes `channel_uses(plan)`. In joules it is this times
        the transmit power in watts over twice the bandwidth in hertz. None on an ideal
        link.
    """
    if not plan.power_share.any():
        return None
    devices = plan.devices
    gains = link.gains(plan.start + len(plan.rounds), devices)[plan.start :]
    known_gains = np.abs(gains)  # what devices know of them, and invert
    if plan.received is not None:
        known_gains = known_gains / plan.received
    transmits = plan.weight > 0
    received_snr = np.where(transmits, link.snr(devices) * known_gains**2, np.inf)
    amplitude = plan.gain[:, None] * plan.weight / plan.scale[:, None]
    received_energy = (amplitude * plan.privacy.clips(devices)) ** 2
    energy = received_energy / (plan.noise_power * received_snr)
    return np.asarray(energy.sum(0))
