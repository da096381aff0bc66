"""A read-only web page about one run, or about a store that holds the captures of many runs.

`app` and `store_app` answer requests, `pages` and `store_pages` make HTML of the read model in `sftriage.runs`, and
`guard` keeps out who has no business here.
"""
