"""Toy models with known laws, and checks that a rule, a drafter or a decoder is correct, for your own tests."""

from jaxspec.analysis.enumeration import Law as Law
from jaxspec.analysis.enumeration import accepted_length as accepted_length
from jaxspec.analysis.enumeration import bias as bias
from jaxspec.analysis.enumeration import joint_law as joint_law
from jaxspec.analysis.enumeration import random_laws as random_laws
from jaxspec.analysis.enumeration import round_law as round_law
from jaxspec.testing.drafter_properties import check_drafter as check_drafter
from jaxspec.testing.gtest import GTest as GTest
from jaxspec.testing.gtest import detectable as detectable
from jaxspec.testing.gtest import g_test as g_test
from jaxspec.testing.gtest import holm as holm
from jaxspec.testing.gtest import sample_texts as sample_texts
from jaxspec.testing.processor_properties import check_processor as check_processor
from jaxspec.testing.properties import check_rule as check_rule
from jaxspec.testing.tables import TIE_GAP as TIE_GAP
from jaxspec.testing.tables import ScriptedDrafter as ScriptedDrafter
from jaxspec.testing.tables import TableLM as TableLM
from jaxspec.testing.tables import model_law as model_law
from jaxspec.testing.tables import tie_gap as tie_gap
