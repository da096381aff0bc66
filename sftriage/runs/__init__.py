"""A run on disk, and the read model that the page, watch, for-step, explain and the reports show.

`directory` has the layout, `journal` appends and reads events, `recordings` cuts windows from recorded steps, `source`
reads one run for all views, and `summary` computes its state.
"""
