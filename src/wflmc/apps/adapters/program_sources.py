"""Which sites of a NumPyro model belong to its examples, and what every device knows.

The equations of the model decide (`dependence`), never the values of data. A site whose
log-density is computed from an example belongs to that example; every other site is
part of the prior, which is public and must not depend on any example.

What else a model computes with, arguments of other lengths and arrays from around it,
every device knows. It is listed in `not_covered` of the posterior, and observations of
such data are refused unless `shared` declares them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wflmc.apps.adapters.cut_program import (
    ArgumentLeaves,
    Leaf,
    Program,
    Refusal,
    leaves_by_path,
    log_density,
    number_kind,
    refuse_site,
)
from wflmc.apps.adapters.dependence import (
    NOTHING,
    Constant,
    Sources,
    all_sources,
    sources_of,
)
from wflmc.apps.adapters.numpyro_types import Site, location_and_scale
from wflmc.posterior.custom.model import EXAMPLE_INDEX
from wflmc.support.trees import ArrayTree, Values

EXAMPLES = "examples"
"""The source that private data are."""
PARAMETERS = "parameters"
"""The source that unconstrained values of latent sites are."""
DISCRETE = "discrete"
"""The source that values of an example's discrete sites are."""
ARGUMENT = "argument"
"""The source that arguments are which every device knows and nobody has declared."""
DECLARED = "declared"
"""The source that arguments are which `shared` declares public."""
OF_EXAMPLE = frozenset([EXAMPLES, DISCRETE])
"""The sources that make a site one of an example."""

STATE_TYPES = ("param", "mutable")
"""Types of sites that hold a value from one run of the model to the next."""
VALUE_TYPES = ("deterministic", *STATE_TYPES)
"""Types of sites that have a value and no density."""

START_FROM_EXAMPLES = Refusal(
    "begins with a value computed from the examples", "initialised without them"
)
SCALED_BY_EXAMPLES = Refusal(
    "has a density that is scaled by the examples",
    "scaled by public numbers: weights of examples are written with numpyro.factor in "
    "their plate",
)
SCALED_BY_LATENT_VALUES = Refusal(
    "has a density that is scaled by a parameter or a discrete variable",
    "scaled by numbers: such powers of a density are written with numpyro.factor",
)
PRIOR_FROM_EXAMPLES = Refusal(
    "has a prior that depends on the examples",
    "a variable whose prior is public: give public numbers, named in shared=…, in "
    "their place",
)
SUPPORT_FROM_EXAMPLE = Refusal(
    "has a support that depends on its example",
    "one with the same support for all examples",
)
SPLIT_DATA = (
    "one of the examples (with numpyro.handlers.mask for outcomes that were not "
    "measured for all of them), or of public arguments that shared=… names"
)


class _SiteSources(NamedTuple):
    """What a site is computed from."""

    value: Sources
    density: Sources = NOTHING
    """Of its log-density, with its scale; none for sites without one."""
    scale: Sources = NOTHING
    """Of what `numpyro.handlers.scale` multiplies its density by."""
    law: Sources = NOTHING
    """Of the location and the scale of its law, where it has both."""


def check_sources(program: Program) -> None:
    """Sort the sites of a model, and refuse one whose prior would depend on data.

    The sites of examples, those of the prior and deterministic sites of public values
    are set, and `not_covered` with sentences on what every device knows. Arguments that
    cannot be traced, because the model needs their values, may reach any site.

    Args:
        program: with its sites on placeholders.

    Raises:
        InputError: names the site, and what it has to be instead.
    """
    arguments = program.numeric_arguments
    # Whole numbers are sizes more often than data, and a size cannot be traced.
    whole_numbers = {
        path: leaf
        for path, leaf in arguments.items()
        if np.ndim(leaf) == 0 and number_kind(leaf) != "f"
    }
    values = {
        path: leaf for path, leaf in arguments.items() if path not in whole_numbers
    }
    traceable_values = _traceable(program, values)
    untraced = [path for path in values if path not in traceable_values]
    sources = _site_sources(program, traceable_values)
    for name, site in program.sites.items():
        if name in sources:
            _check_site_sources(program, name, site["type"], sources[name])

    numbers = {
        path: leaf for path, leaf in whole_numbers.items() if leaf != program.count
    }
    traceable_numbers = _traceable(program, numbers)
    observed = [name for name, site in program.sites.items() if site.get("is_observed")]
    if not all(OF_EXAMPLE & sources[name].density for name in observed):
        sources = _site_sources(program, traceable_values | traceable_numbers)
    for name in observed:
        _check_observed_sources(program, name, sources[name], untraced)
    _sort_sites(program, sources)

    public_arguments = values | traceable_numbers | program.opaque_arguments
    densities = all_sources([site.density for site in sources.values()])
    program.not_covered = _not_covered(program, public_arguments, densities)


def _site_sources(
    program: Program, arguments: ArgumentLeaves
) -> dict[str, _SiteSources]:
    """Return what every site is computed from, on as many placeholders as examples.

    Args:
        program: with its sites.
        arguments: no examples, by path; the sources tell them from constants.
    """
    undeclared = {
        path: leaf for path, leaf in arguments.items() if not program.is_declared(path)
    }
    declared = {
        path: leaf for path, leaf in arguments.items() if program.is_declared(path)
    }
    examples = program.placeholders(program.count)
    index = examples.pop(EXAMPLE_INDEX)
    inputs: dict[str, ArrayTree] = {
        EXAMPLES: examples,
        EXAMPLE_INDEX: index,
        PARAMETERS: program.start,
        DISCRETE: program.first_values,
        ARGUMENT: undeclared,
        DECLARED: declared,
    }

    def quantities(inputs: dict[str, Any]) -> dict[tuple[str, str], ArrayTree]:
        index = inputs[EXAMPLE_INDEX]
        examples = inputs[EXAMPLES] | {EXAMPLE_INDEX: index}
        arguments = inputs[ARGUMENT] | inputs[DECLARED]
        model = program.seeded_model_on(examples, arguments)
        parameters = program.parameters_of(inputs[PARAMETERS], index)
        discrete = program.discrete_values(inputs[DISCRETE], program.count)
        results: dict[tuple[str, str], ArrayTree] = {}
        for name, site in program.trace(model, parameters, discrete).items():
            for quantity, value in _site_quantities(site, parameters).items():
                results[name, quantity] = value
        return results

    by_site: dict[str, dict[str, Sources]] = {}
    for (name, quantity), sources in sources_of(quantities, inputs).items():
        by_site.setdefault(name, {})[quantity] = all_sources(sources)
    return {name: _SiteSources(**sources) for name, sources in by_site.items()}


def _site_quantities(site: Site, parameters: Values) -> dict[str, ArrayTree]:
    """Return the quantities of a site whose sources decide, as `_SiteSources` has them.

    Sites of other types, such as plates, have none.
    """
    if site["type"] in VALUE_TYPES:
        return {"value": site["value"]}
    if site["type"] != "sample":
        return {}
    scale = 1.0 if site["scale"] is None else site["scale"]
    return {
        "value": site["value"],
        "density": (log_density(site, parameters), scale),
        "scale": scale,
        "law": location_and_scale(site["fn"]),
    }


def _traceable(program: Program, arguments: ArgumentLeaves) -> dict[str, Leaf]:
    """Return the arguments that a model takes as arrays, whatever their values.

    All are tried together first, and one by one if that fails.
    """

    def is_traceable(arguments: ArgumentLeaves) -> bool:
        try:
            _site_sources(program, arguments)
        except Exception:
            # Whatever a user's model may raise: it may call NumPy, or loop as often as
            # a number says.
            return False
        return True

    if not arguments or is_traceable(arguments):
        return dict(arguments)
    return {
        path: leaf for path, leaf in arguments.items() if is_traceable({path: leaf})
    }


def _sort_sites(program: Program, sources: Mapping[str, _SiteSources]) -> None:
    """Sort the sites of a model into those of its examples and all others."""
    of_example: list[str] = []
    prior_sites: list[str] = []
    public_values: list[str] = []
    for name, site in program.sites.items():
        if site["type"] == "sample":
            is_summed_over = name in program.supports
            is_in_plate = site["is_observed"] and program.is_in_example_plate(name)
            is_computed = bool(OF_EXAMPLE & sources[name].density)
            if is_summed_over or is_in_plate or is_computed:
                of_example.append(name)
            else:
                prior_sites.append(name)
        elif site["type"] == "deterministic" and not OF_EXAMPLE & sources[name].value:
            public_values.append(name)
    program.likelihood_axes = dict.fromkeys(of_example)
    program.prior_sites = tuple(prior_sites)
    program.public_values = tuple(public_values)
    program.is_centred = any(
        PARAMETERS in sources[name].law for name in program.location_scale_sites
    )


def _check_site_sources(
    program: Program, name: str, site_type: str, sources: _SiteSources
) -> None:
    """Refuse a site that depends on data, or is scaled, in a way that cannot be split.

    No scale or initial value may be computed from examples, and no latent site of all
    examples may depend on any. A latent site of an example may depend on that example
    by its density, and not by its support. Scales must not depend on latent values, as
    they are read once (`Program.densities`).

    Args:
        program: with its sites on placeholders.
        name: of the site.
        site_type: as NumPyro names it.
        sources: of the site.
    """
    if site_type in STATE_TYPES and EXAMPLES in sources.value:
        refuse_site(name, START_FROM_EXAMPLES)
    if EXAMPLES in sources.scale:
        refuse_site(name, SCALED_BY_EXAMPLES)
    if frozenset([PARAMETERS, DISCRETE]) & sources.scale:
        refuse_site(name, SCALED_BY_LATENT_VALUES)
    if name not in program.start:
        return
    is_local = site_type == "sample" and program.is_in_example_plate(name)
    if not is_local and OF_EXAMPLE & (sources.density | sources.value):
        refuse_site(name, PRIOR_FROM_EXAMPLES)
    if EXAMPLES in sources.value:
        refuse_site(name, SUPPORT_FROM_EXAMPLE)


def _check_observed_sources(
    program: Program, name: str, sources: _SiteSources, untraced: Sequence[str]
) -> None:
    """Refuse an observed site, or a factor, of data that are no examples.

    No clipping limits what a record in such data does to the posterior. Data that are
    declared public are allowed.

    Args:
        program: with its examples and declared arguments.
        name: of the site.
        sources: of the site.
        untraced: arguments that any site may depend on, as they cannot be traced.
    """
    undeclared = [path for path in untraced if not program.is_declared(path)]
    value_constants: set[Constant] = set()
    density_constants: set[Constant] = set()
    if len(undeclared) == len(untraced):
        # Otherwise constants may be computed from a declared argument that cannot be
        # traced.
        value_constants = _constants(sources.value)
        density_constants = _data_like(program, sources.density)
    observes_other_data = not OF_EXAMPLE & sources.value and bool(
        ARGUMENT in sources.value or value_constants
    )
    has_other_density = not OF_EXAMPLE & sources.density and bool(
        ARGUMENT in sources.density or density_constants or undeclared
    )
    if observes_other_data or has_other_density:
        fault = (
            f"depends on data that are not split as the {program.count} examples are"
        )
        refuse_site(name, Refusal(fault, SPLIT_DATA))


def _constants(sources: Sources) -> set[Constant]:
    return {source for source in sources if isinstance(source, Constant)}


def _data_like(program: Program, sources: Sources) -> set[Constant]:
    """Return the constants that may be data.

    Libraries have arrays of whole numbers of their own, but not of length N.
    """
    return {
        constant
        for constant in _constants(sources)
        if constant.kind == "f" or program.count in constant.shape
    }


def _not_covered(
    program: Program,
    public_arguments: ArgumentLeaves,
    sources: Sources,
) -> dict[str, str]:
    """Return sentences, by name, on what every device knows of a model but examples.

    Args:
        program: with its arguments.
        public_arguments: no examples, by path.
        sources: of all densities.
    """
    undeclared = [path for path in public_arguments if not program.is_declared(path)]
    declared = [
        path for path in leaves_by_path(program.arguments) if program.is_declared(path)
    ]
    shapes = {str(constant.shape) for constant in _data_like(program, sources)}
    lists = [name for name in program.list_arguments if not program.is_declared(name)]
    sentences = {}
    if undeclared:
        sentences["arguments of the model"] = (
            "Arguments that are not split as examples are, and that every device knows "
            f"in full: {', '.join(undeclared)}."
        )
    if declared:
        sentences["shared arguments of the model"] = (
            "Arguments that shared=… declares public, and that every device knows in "
            f"full: {', '.join(declared)}."
        )
    if shapes:
        sentences["arrays around the model"] = (
            "Arrays that the model takes from outside its arguments, and every device "
            f"knows, of shapes: {', '.join(sorted(shapes))}."
        )
    if lists:
        sentences["types of lists"] = (
            "Whether the numbers of a list are whole, which all of its entries decide "
            f"(give arrays instead): {', '.join(lists)}."
        )
    if not program.runs_on_ones:
        sentences["memory of the model"] = (
            "The model does not run on ones, so that it saw the data first: what its "
            "code keeps of them is not seen."
        )
    return sentences
