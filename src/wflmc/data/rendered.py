"""Digits rendered from fonts: labelled images that nobody has to be asked for.

Every image is a digit of one of the fonts that Matplotlib ships, turned, sheared,
stretched and bent at random, then laid out as MNIST's digits are: in a box of 20 × 20
pixels whose centre of mass is in the middle of 28 × 28. As the images depend on no data,
what is computed from them is public.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import without_data

Array = NDArray[np.float64]

FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
"""Files of Matplotlib, without their suffix: all of its fonts with Arabic digits."""
DIGITS = 10
SIDE = 28
"""Pixels of an image in each direction."""
BOX = 20
"""Pixels of the box that a digit fills, in its longer direction."""
OVERSAMPLING = 4
"""Rendered pixels per pixel, in each direction."""
POINTS_PER_EDGE = 6
"""Points by which a straight edge of an outline is replaced, so that it may bend."""
TURN = 0.2
"""Standard deviation of the angle, in radians."""
SHEAR = 0.25
"""Standard deviation of the sine that leans a digit to one side."""
STRETCH = 0.2
"""Standard deviation of the logarithm of the width over the height."""
BEND = 0.06
"""Standard deviation of the amplitude of the bends, over the height."""
BENDS = 2
"""Sines by which each coordinate is bent along the other."""
LARGEST_DEVIATION = 2.0
"""Standard deviations that are not exceeded."""
STROKE = (0.0, 2.0)
"""Pixels by which strokes are made wider, at least and at most."""


@without_data
class RenderedDigits(NamedTuple):
    """Images and their digits, in random order."""

    images: NDArray[np.uint8]
    """[N, 784], the ink from 0 to 255."""
    labels: NDArray[np.uint8]
    """[N]."""


class _Outline(NamedTuple):
    """The outline of a digit in a font, its height 1 and its middle at the origin."""

    polygons: list[Array]
    """Points [n, 2] of each; an inner one is a hole."""


def render_digits(count: int, seed: int) -> RenderedDigits:
    """Render digits, as many of each as of any other but for one.

    Args:
        count: the number of images, N.
        seed: of fonts and distortions; equal seeds give equal images with the same
            versions of Matplotlib and NumPy.

    Returns:
        The images and their labels.
    """
    generator = np.random.default_rng(seed)
    outlines = [[_outline(font, digit) for digit in range(DIGITS)] for font in FONTS]
    labels = generator.permutation(np.arange(count) % DIGITS).astype(np.uint8)
    images = np.empty((count, SIDE * SIDE), np.uint8)
    for index, digit in enumerate(labels):
        outline = outlines[generator.integers(len(FONTS))][digit]
        polygons = _distort(outline, generator)
        stroke = generator.uniform(*STROKE)
        images[index] = _centre(_draw(polygons, stroke)).ravel()
    return RenderedDigits(images, labels)


def _outline(font: str, digit: int) -> _Outline:
    """Return the outline of a digit in one of `FONTS`."""
    # Matplotlib takes long to import, and is needed here alone.
    from matplotlib import get_data_path
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    file = Path(get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    path = TextPath((0, 0), str(digit), size=100, prop=FontProperties(fname=str(file)))
    polygons = [_subdivide(np.asarray(polygon)) for polygon in path.to_polygons()]
    points = np.concatenate(polygons)
    lowest = points.min(0)
    highest = points.max(0)
    height = highest[1] - lowest[1]
    middle = (lowest + highest) / 2
    return _Outline([(polygon - middle) / height for polygon in polygons])


def _subdivide(polygon: Array) -> Array:
    """Return a closed polygon [n, 2] with more points on every edge."""
    fraction = np.arange(POINTS_PER_EDGE)[:, None] / POINTS_PER_EDGE
    first = polygon[:-1, None]
    edge = np.diff(polygon, axis=0)[:, None]
    return (first + fraction * edge).reshape(-1, 2)


def _distort(outline: _Outline, generator: np.random.Generator) -> list[Array]:
    """Return the polygons of an outline, turned, sheared, stretched and bent."""

    def draw(deviation: float, size: int) -> Array:
        normal = generator.standard_normal(size)
        return deviation * np.clip(normal, -LARGEST_DEVIATION, LARGEST_DEVIATION)

    (turn,) = draw(TURN, 1)
    (shear,) = draw(SHEAR, 1)
    (stretch,) = draw(STRETCH, 1)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    leaning = np.array([[np.exp(stretch), shear], [0.0, 1.0]])
    matrix = rotation @ leaning
    amplitude = draw(BEND, 2 * BENDS).reshape(BENDS, 2)
    phase = generator.uniform(0, 2 * np.pi, (BENDS, 2))
    frequency = np.pi * np.arange(1, BENDS + 1)[:, None]

    def bend(points: Array) -> Array:
        # Each coordinate moves along the other.
        angle = frequency * points[:, None, ::-1] + phase
        return points + (amplitude * np.sin(angle)).sum(1)

    return [bend(polygon) @ matrix.T for polygon in outline.polygons]


def _draw(polygons: list[Array], stroke: float) -> Array:
    """Return the ink of polygons that fill a box of 20 × 20 pixels, [28, 28].

    Args:
        polygons: closed ones; what an even number of them covers is empty.
        stroke: pixels by which strokes are made wider.
    """
    points = np.concatenate(polygons)
    lowest = points.min(0)
    highest = points.max(0)
    middle = (lowest + highest) / 2
    scale = (BOX - stroke) / (highest - lowest).max()
    placed = [(polygon - middle) * scale + SIDE / 2 for polygon in polygons]
    ink = _rasterize(placed, stroke)
    blocks = ink.reshape(SIDE, OVERSAMPLING, SIDE, OVERSAMPLING)
    return np.asarray(blocks.mean((1, 3)))


def _rasterize(polygons: list[Array], stroke: float) -> Array:
    """Return the ink of polygons in finer pixels, four in each direction of one."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.path import Path as Outline
    from matplotlib.transforms import Affine2D

    closed = [np.concatenate([polygon, polygon[:1]]) for polygon in polygons]
    parts = [Outline(points, closed=True) for points in closed]
    outline = Outline.make_compound_path(*parts)
    pixels = OVERSAMPLING * SIDE
    # Matplotlib has types for its paths, but none for its renderer.
    renderer = RendererAgg(pixels, pixels, dpi=72)  # type: ignore[no-untyped-call]
    context = renderer.new_gc()
    context.set_linewidth(OVERSAMPLING * stroke)
    black = (0.0, 0.0, 0.0)
    context.set_foreground(black)
    enlarged = Affine2D().scale(OVERSAMPLING)
    renderer.draw_path(context, outline, enlarged, black)  # type: ignore[no-untyped-call]
    image = np.asarray(renderer.buffer_rgba())  # type: ignore[no-untyped-call]
    return image[..., 3].astype(float)


def _centre(ink: Array) -> NDArray[np.uint8]:
    """Return an image whose centre of mass is in the middle, by whole pixels."""
    weight = ink / ink.sum()
    position = np.arange(SIDE)
    row = weight.sum(1) @ position
    column = weight.sum(0) @ position
    middle = (SIDE - 1) / 2
    shift = (round(middle - row), round(middle - column))
    moved = np.zeros_like(ink)
    source = ink[_kept(shift[0]), _kept(shift[1])]
    moved[_kept(-shift[0]), _kept(-shift[1])] = source
    return np.rint(moved).astype(np.uint8)


def _kept(shift: int) -> slice:
    """Return the pixels that stay within the image when it moves."""
    return slice(max(0, -shift), SIDE - max(0, shift))
