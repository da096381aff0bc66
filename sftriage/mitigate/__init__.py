"""A straggler that stays, lived with: all-reduce under a late rank (StragglAR), pipelines under a slow link (Adaptra).

The schedules and their costs are pure. What runs in a trainer is in the modules that import torch, and in no other.
"""
