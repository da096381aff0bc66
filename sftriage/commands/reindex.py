"""``sftriage traces reindex``: a catalogue, built again from the store that it is an index of."""

from __future__ import annotations

from sftriage.commands.catalogues import own_catalogue, say, whole_store
from sftriage.commands.options import CatalogueOption, JsonOption, RunOption, StoreOption
from sftriage.commands.output import counting, notices, print_json
from sftriage.records import plain
from sftriage.runtime.catalogue_urls import catalogue_url
from sftriage.traces.catalogue import Catalogue


def reindex_traces(
    run: RunOption = None,
    store: StoreOption = None,
    catalogue: CatalogueOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the catalogue of a run or store again from its manifests, and say what in it is none.

    In a catalogue that others share, nothing of theirs is touched.
    """
    directory, meant = whole_store(run, store)
    built = Catalogue(catalogue_url(catalogue) or own_catalogue(directory, meant), meant)
    with counting("Reading manifests") as progress:
        found = built.reindex(progress)
    say(*found.problems)
    if as_json:
        print_json({"store": meant.place, "catalogue": built.name, **plain(found)})
    else:
        captures = "1 capture" if found.captures == 1 else f"{found.captures} captures"
        odd = f", and {len(found.problems)} that cannot be used" if found.problems else ""
        notices().print(f"Indexed {captures} of {meant.place}{odd}.", soft_wrap=True, markup=False)
