"""Gold standards: posteriors of posteriordb by one recipe, without hand-tuned steps,
beside their reference draws.

    python examples/gold/recipe.py FOLDER          # of the JSON files: data and reference means and sds

Data are split over 5 devices, without privacy (`no-dp`) and over an ideal link: what is
left is the error of sampling.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import wflmc

sys.path.insert(0, str(Path(__file__).parent))
import models

DEVICES, CHAINS = 5, 100
IDEAL = {
    "link": wflmc.Link(wflmc.channel.static(), snr_db=150),
    "privacy": wflmc.Privacy(clip=1e5),
}
MEAN, SPREAD = 0.1, 0.05
"""The largest error of a mean in reference standard deviations, and of a standard
deviation, relative.
"""


def draw(name, data, devices=DEVICES, chains=CHAINS):
    """Values by site of [chain, draw], by the recipe: from_numpyro, plan and sample
    with their defaults.
    """
    posterior = wflmc.from_numpyro(getattr(models, name), data, devices=devices)
    plan = wflmc.plan(posterior, **IDEAL, policy=wflmc.Policy("no-dp"))
    return posterior.unflatten(
        wflmc.sample(jax.random.key(1), posterior, plan, chains=chains).theta
    )


def errors(draws, reference):
    """Errors of every parameter's mean and standard deviation, by name."""
    found = {}
    for name, known in reference.items():
        site, _, index = name.partition("[")
        values = np.asarray(draws[site], float)
        values = values[..., int(index[:-1]) - 1] if index else values
        found[name] = (
            abs(values.mean() - known["mean"]) / known["sd"],
            abs(values.std() / known["sd"] - 1),
        )
    return found


def main():
    options = argparse.ArgumentParser(
        description="Posteriors of posteriordb beside their reference draws"
    )
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="*")
    given = options.parse_args()
    print(
        "posterior | parameters | largest error of a mean, in sd | of a sd | seconds\n---|---|---|---|---"
    )
    began, good, paths = time.perf_counter(), 0, sorted(given.folder.glob("*.json"))
    paths = [path for path in paths if not given.names or path.stem in given.names]
    for path in paths:
        content, start = json.loads(path.read_text()), time.perf_counter()
        found = errors(
            draw(path.stem.partition("-")[2], content["data"]), content["reference"]
        )
        mean, spread = (max(values) for values in zip(*found.values(), strict=True))
        good += mean <= MEAN and spread <= SPREAD
        seconds = time.perf_counter() - start
        print(
            f"{path.stem} | {len(found)} | {mean:.3f} | {spread:.1%} | {seconds:.0f}",
            flush=True,
        )
    limits = f"{MEAN} sd in every mean and {SPREAD:.0%} in every sd"
    print(
        f"\n{good} of {len(paths)} within {limits}; {time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
