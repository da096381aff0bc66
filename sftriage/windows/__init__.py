"""Recorded steps: decoded, found in logs, and put together to windows, of a live job and of a recording alike."""
