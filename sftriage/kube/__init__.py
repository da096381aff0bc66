"""Custom resources: policies, captures and reports as objects of a cluster, and what their status says. Mostly pure.

`crds` has the definitions, made of the same models that check a policy on the command line; `policies`, `captures` and
`reports` decide what a status says; `operator` is the shell that watches objects and writes.
"""
