"""Writes errors of the Python API in the words of the command line: `max_new_tokens` becomes `--max-new-tokens`."""

import argparse
import re

PHRASES = (
    (r"set a draft length, or jaxspec\.dynamic\([\w, ]*\)", "give --draft-length, or --tree dynamic-BEAMxDEPTH-NODES"),
    (r"jaxspec\.dynamic\([\w, ]*\)", "--tree dynamic-BEAMxDEPTH-NODES"),
    (r"jaxspec\.branching\(([\d, ]+)\)", lambda match: f"--tree {match[1].replace(', ', 'x')}"),
    (r"(?:jaxspec\.)?load\(\.\.\., \w+=\w+\) \((--[\w-]+ \w+)\)", r"\1"),
    (r"(?:jaxspec\.)?load\(\.\.\., (\w+)=(\w+)\)", r"\1=\2"),
    (r"key=jax\.random\.key\(\w+\)", "--seed"),
)
"""Calls of the Python API in messages, as patterns, and their replacements on the command line."""
OTHER_NAMES = {"draft": "draft_model", "drafter_options": "drafter_option"}
"""Arguments of the Python API whose options have other names."""


def as_flags(message: str, parser: argparse.ArgumentParser) -> str:
    """Returns a message of the Python API with the names of this parser's options.

    An argument is replaced where it cannot be a word of the sentence: before an equals sign (`batch=`, `chat=False`),
    and if its name has an underscore. Arguments for which the parser has no option remain as they are.
    """
    for pattern, instead in PHRASES:
        message = re.sub(pattern, instead, message)
    # The first of several options that set one argument stands for all of them.
    options = {action.dest: action.option_strings for action in reversed(parser._actions) if action.option_strings}
    options |= {name: options[dest] for name, dest in OTHER_NAMES.items() if dest in options}
    for name, flags in sorted(options.items(), key=lambda item: -len(item[0])):
        negative = next((flag for flag in flags if flag.startswith("--no-")), None)
        message = re.sub(rf"{_ALONE}{name}=False\b", negative or rf"without {flags[0]}", message)
        message = re.sub(rf"{_ALONE}{name}=(?:True\b|\.\.\.|(?=[\s;,.)]|$))", flags[0], message)
        message = re.sub(rf"{_ALONE}{name}=(?=\S)", f"{flags[0]} ", message)
        if "_" in name:
            message = re.sub(rf"{_ALONE}{name}\b", flags[0], message)
    return re.sub(r"(--[\w-]+)(?:, or|,) \1(?![\w-])|(--[\w-]+) \(\2\)", r"\1\2", message)


_ALONE = r"(?<![\w./'\"-])"
