"""Chains on several hosts: each one runs this script with its own --host, and host 0
puts the parts together.

python examples/multihost.py --coordinator ADDRESS:PORT --hosts 2 --host 0 --out chains    # on the first
python examples/multihost.py --coordinator ADDRESS:PORT --hosts 2 --host 1 --out chains    # on the second

ADDRESS is that of host 0, and --out a folder that all hosts see. With --hosts 1 no
coordinator is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import wflmc

CHAINS = 12


def sampled(numbers: np.ndarray) -> wflmc.Trace:
    """The chains of these numbers, over the accelerators of this host; every host makes
    the same plan.
    """
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    plan = wflmc.plan(
        posterior,
        wflmc.Link(wflmc.channel.rayleigh(power=0.01), snr_db=20),
        wflmc.Privacy(epsilon=15, delta=0.01, clip=30),
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=50,
    )
    return wflmc.sample(
        jax.random.key(1),
        posterior,
        plan,
        len(numbers),
        numbers=numbers.tolist(),
        execution=wflmc.sampling.Execution(accelerators=jax.local_devices()),
    )


def main() -> None:
    """Sample this host's share of the chains, write it, and join all shares on host 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", help="address and port of host 0")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("chains"))
    options = parser.parse_args()
    if options.hosts > 1:
        address = (
            options.coordinator
        )  # host 0 listens there alone, not on all its networks
        jax.distributed.initialize(
            address, options.hosts, options.host, coordinator_bind_address=address
        )
    options.out.mkdir(parents=True, exist_ok=True)
    mine = np.array_split(np.arange(CHAINS), options.hosts)[options.host]
    np.save(options.out / f"part-{options.host}.npy", sampled(mine).theta)
    multihost_utils.sync_global_devices("every part is written")
    if options.host == 0:
        parts = [
            np.load(options.out / f"part-{host}.npy") for host in range(options.hosts)
        ]
        theta = np.concatenate(parts)
        np.save(options.out / "theta.npy", theta)
        print(
            f"{len(theta)} chains of {theta.shape[1]} samples from {options.hosts} hosts in {options.out}/theta.npy"
        )


if __name__ == "__main__":
    main()
