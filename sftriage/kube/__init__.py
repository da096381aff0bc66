"""Custom resources: policies, captures and reports as objects of a cluster, and what their status says. Mostly pure.

`objects` has the models that ``k8s/make_crds.py`` makes the definitions of; `policies`, `captures` and
`reports` decide what a status says; `operator` is the shell that watches objects and writes.
"""
