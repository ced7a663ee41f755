"""Names that `weight_convert` offers, for type checkers."""

from weight_convert.catalog import Catalog as Catalog
from weight_convert.catalog import detect_spec as detect_spec
from weight_convert.catalog import read_catalog as read_catalog
from weight_convert.conversion import Report as Report
from weight_convert.conversion import convert as convert
from weight_convert.errors import CorruptFileError as CorruptFileError
from weight_convert.errors import IncompleteExpertsError as IncompleteExpertsError
from weight_convert.errors import TargetExistsError as TargetExistsError
from weight_convert.errors import UnknownFamilyError as UnknownFamilyError
from weight_convert.errors import WeightConvertError as WeightConvertError
from weight_convert.families import FamilySpec as FamilySpec
from weight_convert.families import FusedExperts as FusedExperts
from weight_convert.families import StoredView as StoredView
from weight_convert.families import get_spec as get_spec
from weight_convert.header import read_header as read_header
from weight_convert.inspection import Summary as Summary
from weight_convert.inspection import inspect as inspect
from weight_convert.plan import ConversionPlan as ConversionPlan
from weight_convert.plan import Extent as Extent
from weight_convert.plan import TargetFile as TargetFile
from weight_convert.plan import plan_conversion as plan_conversion
from weight_convert.verification import Difference as Difference
from weight_convert.verification import VerifyReport as VerifyReport
from weight_convert.verification import verify as verify

__all__ = [
    "Catalog",
    "ConversionPlan",
    "CorruptFileError",
    "Difference",
    "Extent",
    "FamilySpec",
    "FusedExperts",
    "IncompleteExpertsError",
    "Report",
    "StoredView",
    "Summary",
    "TargetExistsError",
    "TargetFile",
    "UnknownFamilyError",
    "VerifyReport",
    "WeightConvertError",
    "convert",
    "detect_spec",
    "get_spec",
    "inspect",
    "plan_conversion",
    "read_catalog",
    "read_header",
    "verify",
]
