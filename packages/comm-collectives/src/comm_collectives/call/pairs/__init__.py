"""Messages between two ranks of a group, over streams of their own beside those of its calls.

May import: base, call, devices, frames, groups, handles, signature.
"""

from comm_collectives.call.pairs.lane import ANY_RANK as ANY_RANK
from comm_collectives.call.pairs.lane import Lane as Lane
from comm_collectives.call.pairs.pair import Message as Message
from comm_collectives.call.pairs.pair import Pair as Pair
from comm_collectives.call.pairs.questions import Question as Question
from comm_collectives.call.pairs.questions import Questions as Questions
from comm_collectives.call.pairs.questions import WaitId as WaitId
from comm_collectives.call.pairs.questions import Waits as Waits
from comm_collectives.call.pairs.questions import read_circle as read_circle
from comm_collectives.call.pairs.transfer import SendHandle as SendHandle
from comm_collectives.call.pairs.transfer import Transfer as Transfer
