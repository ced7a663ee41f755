"""A schedule as text, as a drawing and as a CSV file.

May import: schedules.table.
"""

from moe_pipeline.schedules.views.csv_file import from_csv as from_csv
from moe_pipeline.schedules.views.csv_file import read_csv as read_csv
from moe_pipeline.schedules.views.csv_file import to_csv as to_csv
from moe_pipeline.schedules.views.picture import format_schedule as format_schedule
from moe_pipeline.schedules.views.svg import to_svg as to_svg
