"""A run on disk, and the read model that the page, watch, for-step, explain and the reports show.

`directory` says what lies where, `journal` appends and reads events (`version1`: those of the version before),
`recordings` gives windows back, and `source` is all of one run as a page sees it.
"""
