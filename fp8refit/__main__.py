"""`python -m fp8refit`: the command line, where its script is not on the path."""

from fp8refit.cli import app

app()
