"""A federation in a folder: what the server gets in `server`, and what every device gets in `device-0`, `device-1`, ….

Each part is all that one machine needs, and the server's has none of the data:

    server/job.npz, job.json              the plan, the key of the noise, the channels
    device-k/terms.json, model.json       what the device agrees to, and which model it computes
    device-k/data.npz                     X and y of this device alone
    device-k/secret                       salts the names of what it was asked
    device-k/ledger.jsonl, answer.npz     what has left the device, once it has answered, and its last answer
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wflmc.errors import InputError
from wflmc.federated.certificates import write_secret
from wflmc.federated.device import Device
from wflmc.federated.job import Job
from wflmc.federated.messages import Terms
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior, gaussian_regression, softmax_regression
from wflmc.privacy import Ledger
from wflmc.scenario.build import Inputs, build_posterior
from wflmc.scenario.schema import Scenario

SERVER, DEVICE = "server", "device-{}"


def write_federation(folder: Path, scenario: Scenario, inputs: Inputs, job: Job, *, with_data: bool = True) -> None:
    """Write the folders of the server and of all devices.

    Args:
        with_data: whether devices get their part of the scenario's data; else each brings a data.npz of its own.
    """
    (folder / SERVER).mkdir(parents=True, exist_ok=True)
    job.save(folder / SERVER)
    raw, _ = build_posterior(scenario)
    about: dict[str, Any] = {
        "model": scenario.posterior.model,
        "devices": job.plan.devices,
        "prior_std": raw.prior_std,
        "intercept": raw.intercept,
        "prior_on": scenario.posterior.prior_on,
        "classes": list(raw.class_names) if isinstance(raw, SoftmaxPosterior) else None,
    }
    coordinates = inputs.posterior.coordinates
    about["whitening"] = None if coordinates is None else np.asarray(coordinates.matrix).tolist()
    for k in range(job.plan.devices):
        place, terms = folder / DEVICE.format(k), job.terms(k)
        place.mkdir(exist_ok=True)
        terms.save(place / "terms.json")
        if (spent := job.plan.ledger[k]) > 0:
            _ledger(place, terms).charge("before", 0, [[spent]])
        (place / "model.json").write_text(json.dumps(about), encoding="utf-8")
        write_secret(place / "secret", secrets.token_bytes(32))
        if with_data:
            rows = raw.features[k, : raw.sizes[k]]
            np.savez(place / "data.npz", X=rows[:, :-1] if raw.intercept else rows, y=raw.outcomes[k, : raw.sizes[k]])


@lru_cache(maxsize=1024)
def open_device(folder: Path) -> Device:
    """Return the device of a folder; the same one again in the same process."""
    terms = Terms.load(folder / "terms.json")
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        with np.load(folder / "data.npz", allow_pickle=False) as saved:
            X, y = saved["X"], saved["y"]
        secret = (folder / "secret").read_bytes()
    except (OSError, ValueError, KeyError) as error:
        raise InputError("device", str(folder), f"the folder of a device, with X and y in data.npz ({error})") from None
    share_of_prior = about["prior_std"] * about["devices"] ** 0.5
    common: dict[str, Any] = {"X": X, "y": y, "intercept": about["intercept"], "prior_std": share_of_prior}
    posterior: GaussianPosterior | SoftmaxPosterior
    if about["model"] == "gaussian":
        posterior = gaussian_regression(jax.random.key(0), 1, **common)
    else:
        posterior = softmax_regression(jax.random.key(0), 1, classes=about["classes"], **common)
    if about["whitening"] is not None:
        posterior = posterior.whitened(np.array(about["whitening"]), about["prior_on"])
        posterior = replace(posterior, subject="")  # else every device would be compiled anew
    return Device(posterior, terms, _ledger(folder, terms) if np.isfinite(terms.sensitivity) else None, secret)


def _ledger(folder: Path, terms: Terms) -> Ledger:
    """Open the device's own ledger."""
    return Ledger(terms.promise, 1, enforced=terms.enforced, path=folder / "ledger.jsonl")
