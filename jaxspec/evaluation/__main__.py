"""`python -m jaxspec.evaluation ...`: the command `lm_eval`, which then knows the model "jaxspec"."""

from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

from jaxspec.evaluation import harness  # noqa: F401 - registers the model

if __name__ == "__main__":
    cli_evaluate()
