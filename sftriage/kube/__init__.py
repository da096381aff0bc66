"""Custom resources: policies, captures and reports as objects of a cluster.

`objects` has the models that ``k8s/make_crds.py`` makes the definitions of; `statuses` decides what a status says;
`operator` watches objects and writes.
"""
