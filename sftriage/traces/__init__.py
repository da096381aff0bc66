"""Traces: the store of captures, the manifest beside each of them, and the catalogue that answers questions.

A trace and its manifest appear together or not at all. The manifest is the truth; the catalogue is an index of it.
"""
