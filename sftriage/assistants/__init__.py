"""A Model Context Protocol server over runs and stores for assistants, read-only and local."""
