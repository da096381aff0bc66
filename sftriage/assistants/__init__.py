"""For whoever asks with an assistant: a Model Context Protocol server over runs and stores, read-only and local."""
