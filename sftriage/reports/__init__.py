"""What a person reads in a terminal, made of records. Nothing here reads a file or knows a command line."""
