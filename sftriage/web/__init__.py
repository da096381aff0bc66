"""One HTTP application, of which a command serves a part: a page, one trace for Perfetto's viewer, or the metrics.

`serving` has the application, its gate, the server and ``/metrics``. `run_page` and `store_page` make pages of the read
model in `sftriage.runs` and of a store; what they share is in `page`, `charts` and `flames`. `viewer` hands one trace
to Perfetto's viewer, and `report` is a page as one file.
"""
