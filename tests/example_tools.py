"""What tests of the example scripts share: loading them by path, and comparing samples
with those of NUTS.
"""

import importlib.util
import sys
from pathlib import Path

import arviz
import numpy as np

FOLDER = Path(__file__).parents[1] / "examples"


def load(name):
    """Return an example script as a module; it finds its neighbours as when run from
    the command line.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def z_scores(theta, known):
    """Return z scores of means and of standard deviations against NUTS, [m] each.

    The error of theta[chain, draw, m] is that between its independent chains; the error
    of known[chain, draw, m], draws of NUTS, is by its effective sample sizes.
    """
    theta, known = theta.astype(float), known.astype(float)
    centre = theta.mean((0, 1))
    count = len(theta) ** 0.5
    of_mean = theta.mean(1).std(0, ddof=1) / count
    variance = ((theta - centre) ** 2).mean(1)
    spread = np.sqrt(variance.mean(0))
    of_spread = variance.std(0, ddof=1) / count / (2 * spread)
    reference = arviz.convert_to_dataset(known)
    errors = [
        arviz.mcse(reference, method=method)["x"].values for method in ("mean", "sd")
    ]
    means = (centre - known.mean((0, 1))) / np.hypot(of_mean, errors[0])
    spreads = (spread - known.std((0, 1), ddof=1)) / np.hypot(of_spread, errors[1])
    return means, spreads


def z_of_difference(first, second):
    """Return the mean of paired differences over their standard error; pairs share
    start and noise.
    """
    differences = np.asarray(first) - np.asarray(second)
    return differences.mean() / (differences.std(ddof=1) / len(differences) ** 0.5)
