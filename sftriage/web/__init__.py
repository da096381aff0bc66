"""sftriage's HTTP server and its pages.

`serving` has access control, the server, ``/metrics``, and the hand-over of a trace to Perfetto's viewer. `run_page`
and `store_page` show runs and stores, on the base of `page`, with `charts` and `flames`; `report` makes one file.
"""
