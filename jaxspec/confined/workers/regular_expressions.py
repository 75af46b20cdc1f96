"""Regular expressions in the confined process: the package outlines-core makes an automaton of one."""

import struct

try:
    import outlines_core
except ImportError:  # the package is optional
    outlines_core = None

END = 256  # stands for the end of a text among the bytes


class RegularExpression:
    """The automaton of a regular expression, in the syntax of the regex crate, that matches whole texts."""

    def __init__(self, expression, most):
        """Makes the automaton.

        Args:
            expression: the regular expression.
            most: the largest number of states.
        """
        if outlines_core is None:
            raise ModuleNotFoundError("outlines_core")
        # Tokens of one byte each: what the automaton reads is bytes, for any vocabulary.
        vocabulary = outlines_core.Vocabulary(END, {bytes([byte]): [byte] for byte in range(256)})
        self._index = outlines_core.Index(expression, vocabulary)
        self._most = most

    def read(self):
        """Returns the number of final states, first state, final states, and (state, byte, next state), as 32 bits."""
        table = self._index.get_transitions()
        if len(table) > self._most:
            raise OverflowError(len(table))
        final = sorted(self._index.get_final_states())
        numbers = [len(final), self._index.get_initial_state(), *final]
        for state, row in table.items():
            for byte, after in row.items():
                if byte != END:
                    numbers += (state, byte, after)
        return struct.pack(f"<{len(numbers)}I", *numbers)
