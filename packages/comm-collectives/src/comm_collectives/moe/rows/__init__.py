"""The rows of one rank: sorted by expert, in their places among the experts, as payload bytes.

May import: planning.
"""

from comm_collectives.moe.rows.choices import Bags as Bags
from comm_collectives.moe.rows.choices import SortedChoices as SortedChoices
from comm_collectives.moe.rows.choices import bags_of as bags_of
from comm_collectives.moe.rows.choices import sort_choices as sort_choices
from comm_collectives.moe.rows.payload import Payload as Payload
from comm_collectives.moe.rows.payload import RowCodec as RowCodec
from comm_collectives.moe.rows.plan import Placing as Placing
from comm_collectives.moe.rows.plan import plan_placing as plan_placing
from comm_collectives.moe.rows.plan import repeat_each as repeat_each
from comm_collectives.moe.rows.plan import spread as spread
from comm_collectives.moe.rows.plan import starts as starts
