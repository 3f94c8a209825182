"""`python -m megatrain` is the `megatrain` command."""

from megatrain.cli import main

main()
