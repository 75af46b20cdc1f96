"""Toys whose every law is known, and the means to prove a rule or a drafter right; for tests, also of your own."""

from jaxspec.testing.exact import accepted_length as accepted_length
from jaxspec.testing.exact import bias as bias
from jaxspec.testing.exact import random_laws as random_laws
from jaxspec.testing.exact import round_law as round_law
from jaxspec.testing.tables import TIE as TIE
from jaxspec.testing.tables import TableLM as TableLM
from jaxspec.testing.tables import tie_gap as tie_gap
