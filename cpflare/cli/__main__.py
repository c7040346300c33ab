"""`python -m cpflare.cli` is the `cpflare` command."""

from cpflare.cli import main

main()
