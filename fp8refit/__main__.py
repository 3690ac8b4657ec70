"""`python -m fp8refit`: the command line, for when the `fp8refit` script is not on `PATH`."""

from fp8refit.cli import app

app()
