"""Grammars: regular expressions and JSON schemas as automata of tokens; see `jaxspec.grammar.compilation`."""
