"""Choose the settings of `wflmc reproduce league`, without any test image: `python -m benchmarks.league`.

For each private data set: on the other one, which is public and whitened by its own moments; and on 5,000 of the
private training images, which ε does not cover. An hour or more on 2 cores, three minutes on an accelerator.
"""

from wflmc.data import Features, load
from wflmc.images import image_whitening
from wflmc.scattering import cached_features
from wflmc.studies.league import CHOSEN, EPSILONS, OTHER, choose, league_features


def public_features(name: str) -> Features:
    """Return the training images of a public data set, whitened by themselves."""
    images = load(name)
    return Features(image_whitening(name)(cached_features(images.train_images), True), images.train_labels.astype(int))


def main() -> None:
    """Print what is chosen, its NLL on held-out images, and whether the study has it."""
    for private, public in OTHER.items():
        features = public_features(public)
        for epsilon in EPSILONS:
            show("other", private, epsilon, choose(features, epsilon))
            show("descent", private, epsilon, choose(features, epsilon, descent=True))
        features = league_features(private)
        for epsilon in (1.0, 3.0):
            show("training", private, epsilon, choose(features, epsilon))


def show(where: str, private: str, epsilon: float, found: list) -> None:
    """Print one choice."""
    nll, best = found[0]
    known = (
        "as in the study"
        if CHOSEN[where, private, epsilon] == best
        else f"the study has {CHOSEN[where, private, epsilon]}"
    )
    print(f"{where:9} {private:14} ε = {epsilon:<4g} NLL {nll:.4f} {best}: {known}", flush=True)


if __name__ == "__main__":
    main()
