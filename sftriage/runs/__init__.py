"""A run on disk: its directory, journal and recorded steps, and the read model that all reports show."""
