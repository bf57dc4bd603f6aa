"""`python -m autotune`, and the console script `autotune`."""

from autotune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
