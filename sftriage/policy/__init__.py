"""Policies: the schema of ``policies/*.yaml``, the reading of them, and the engine that decides.

`parsing` turns YAML into a checked `TriagePolicy`, and `in_force` several files into a `PolicySet`; `engine.decide`
turns a verdict into a recorded decision, and `state` holds what the engine must remember.
"""
