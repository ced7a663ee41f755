"""What a family calls its tensors in each format, as data that is read in both directions.

A room of its own, since every other one asks it for names and nothing here opens a weight file.

May import: nothing but checks and errors.
"""

from weight_convert.specs.family import FamilySpec as FamilySpec
from weight_convert.specs.family import Format as Format
from weight_convert.specs.family import StoredView as StoredView
from weight_convert.specs.loader import family_names as family_names
from weight_convert.specs.loader import get_spec as get_spec
from weight_convert.specs.loader import read_spec as read_spec
from weight_convert.specs.loader import spec_text as spec_text
from weight_convert.specs.matching import Matcher as Matcher
from weight_convert.specs.matching import fill as fill
from weight_convert.specs.rules import EXPERT as EXPERT
from weight_convert.specs.rules import Rule as Rule
from weight_convert.specs.rules import Side as Side
