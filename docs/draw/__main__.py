"""Draw the documentation's pictures: all of them, or those that are named."""

import sys

from docs.draw.digits import draw_digits
from docs.draw.gallery import POLICIES, draw_policies, table
from docs.draw.idea import draw_channel, draw_gain, draw_three_gains
from docs.draw.theory import draw_distances, draw_regimes, draw_step_sizes

PICTURES = {
    "channel": draw_channel,
    "gain": draw_gain,
    "three_gains": draw_three_gains,
    "regimes": draw_regimes,
    "distances": draw_distances,
    "step_sizes": draw_step_sizes,
    "digits": draw_digits,
    "gallery": draw_policies,
}


def main(names: list[str]) -> None:
    """Draw the named pictures into docs/figures, and print the gallery's table."""
    chosen = names or list(PICTURES)
    for name in chosen:
        PICTURES[name]()
        print("drawn:", name)
    if "gallery" in chosen:
        print(table(POLICIES))


main(sys.argv[1:])
