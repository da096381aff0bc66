"""Puts the parts together: a job on this host with its agent and controller. Nothing here knows a command line."""
