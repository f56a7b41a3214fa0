"""Draw the documentation's pictures into docs/figures: all of them, or those that are named."""

import sys

from docs.draw.gallery import POLICIES, draw_policies, table
from docs.draw.idea import draw_channel, draw_gain, draw_loudness
from docs.draw.theory import draw_distances, draw_regimes, draw_step_sizes

PICTURES = {
    "channel": draw_channel,
    "gain": draw_gain,
    "loudness": draw_loudness,
    "regimes": draw_regimes,
    "distances": draw_distances,
    "step_sizes": draw_step_sizes,
    "gallery": draw_policies,
}

for name in sys.argv[1:] or PICTURES:
    PICTURES[name]()
    print("drawn:", name)
if not sys.argv[1:] or "gallery" in sys.argv:
    print(table(POLICIES))
