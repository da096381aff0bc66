"""One HTTP application, of which a command serves a part: a page, one trace for Perfetto's viewer, or the metrics.

`app` is the application and its gate, `serving` the server. `run_page` and `store_page` make pages of the read model in
`sftriage.runs` and of `store_source`; what they share is in `page`, `rendering`, `charts` and `downloads`. `viewer`
hands one trace to Perfetto's viewer, and `metrics` answers ``/metrics``.
"""
