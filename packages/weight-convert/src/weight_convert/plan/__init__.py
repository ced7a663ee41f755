"""A conversion as data: which source bytes make up which output tensor and file.

Everything is decided here, from headers alone, so that a dry run is exact.

May import: outputs, operations, specs, files.
"""

from weight_convert.plan.alignment import in_format_of as in_format_of
from weight_convert.plan.completeness import check_complete as check_complete
from weight_convert.plan.conversion_plan import ConversionOptions as ConversionOptions
from weight_convert.plan.conversion_plan import ConversionPlan as ConversionPlan
from weight_convert.plan.conversion_plan import check_arguments as check_arguments
from weight_convert.plan.conversion_plan import plan_conversion as plan_conversion
from weight_convert.plan.detection import detect_format as detect_format
from weight_convert.plan.detection import spec_of as spec_of
from weight_convert.plan.detection import stored_roles as stored_roles
from weight_convert.plan.regroup import as_stored as as_stored
from weight_convert.plan.regroup import copied_in_memory as copied_in_memory
from weight_convert.plan.regroup import in_memory as in_memory
