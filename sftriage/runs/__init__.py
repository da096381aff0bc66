"""A run on disk, and the read model that the page, watch, for-step, explain and the reports show.

`directory` says what lies where, `journal` appends and reads events, `recordings` gives
windows back, and `source` is all of one run as a page sees it.
"""
