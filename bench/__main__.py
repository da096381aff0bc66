"""`python -m bench`."""

from bench.runner import main

if __name__ == "__main__":
    main()
