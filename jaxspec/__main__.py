"""The command line, as `python -m jaxspec`."""

from jaxspec.cli import run_process

if __name__ == "__main__":
    run_process()
